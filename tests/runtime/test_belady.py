"""The cache of chunks: no other way to evict gathers less (Belady), by enumeration."""

import itertools
from collections.abc import Iterator

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moetune.domain.chunks import FEWEST_PLACES, Use
from moetune.runtime.sharded.belady import Fetch, NextUses, fetches_of_step
from tests.runtime.gathers_oracle import fewest_gathers as optimum

Cache = frozenset[int]


def fewest_places(order: list[Use]) -> int:
    return max(FEWEST_PLACES, *(len(set(use.chunks)) for use in order))


def replay(order: list[Use], num_places: int) -> list[tuple[Fetch, ...]]:
    """Return the gathers of each step of a period, which begins when a cache comes again."""
    uses, cache = NextUses(order), frozenset[int]()
    seen: dict[Cache, int] = {}
    steps: list[tuple[Fetch, ...]] = []
    while cache not in seen:
        seen[cache] = len(steps)
        gathers, cache = fetches_of_step(order, uses, num_places, cache)
        steps.append(gathers)
    return steps[seen[cache] :]


def num_gathers(order: list[Use], num_places: int) -> float:
    steps = replay(order, num_places)
    return sum(map(len, steps)) / len(steps)


def fewest_gathers(order: list[Use], num_places: int) -> float:
    """Return the fewest gathers a step of an endless run: the cheapest cycle of caches.

    Every choice is tried: which of the chunks stay that are no longer needed.
    """
    chunks = sorted({chunk for use in order for chunk in use.chunks})
    caches = [
        frozenset(some)
        for size in range(min(num_places, len(chunks)) + 1)
        for some in itertools.combinations(chunks, size)
    ]
    once = {start: one_step(order, start, num_places) for start in caches}
    best = float("inf")
    for start in caches:
        costs: dict[Cache, int] = {start: 0}
        for steps in range(1, len(caches) + 1):
            reached: dict[Cache, int] = {}
            for cache, cost in costs.items():
                for end, more in once[cache].items():
                    reached[end] = min(reached.get(end, cost + more), cost + more)
            costs = reached
            if start in costs:
                best = min(best, costs[start] / steps)
            if steps >= 4:
                break
    return best


def one_step(order: list[Use], start: Cache, num_places: int) -> dict[Cache, int]:
    """Return the fewest gathers to every cache that a step can end with."""
    costs = {start: 0}
    for use in order:
        reached: dict[Cache, int] = {}
        for cache, cost in costs.items():
            missing = set(use.chunks) - cache
            for kept in subsets(cache - set(use.chunks)):
                after = frozenset(kept) | set(use.chunks)
                if len(after) > num_places:
                    continue
                left = frozenset(after - set(use.leaves))
                reached[left] = min(reached.get(left, 99), cost + len(missing))
        costs = reached
    return costs


def subsets(some: Cache) -> Iterator[tuple[int, ...]]:
    for size in range(len(some) + 1):
        yield from itertools.combinations(sorted(some), size)


@st.composite
def orders(draw: st.DrawFn) -> list[Use]:
    uses = draw(
        st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=2), min_size=1, max_size=7)
    )
    leaving = draw(st.sets(st.integers(0, 3)))
    order = []
    for index, chunks in enumerate(uses):
        later = set().union(*uses[index + 1 :])
        leaves = tuple(sorted((chunks & leaving) - later))
        order.append(Use(chunks=tuple(sorted(chunks)), leaves=leaves))
    return order


@settings(max_examples=150, deadline=None)
@given(order=orders(), num_places=st.integers(2, 4))
def test_no_other_way_to_evict_gathers_less(order: list[Use], num_places: int) -> None:
    assume(fewest_places(order) <= num_places)
    assert num_gathers(order, num_places) == fewest_gathers(order, num_places)


@settings(max_examples=100, deadline=None)
@given(order=orders(), num_places=st.integers(2, 4))
def test_fetches_as_early_as_they_say_never_overfill_the_cache_and_serve_every_use(
    order: list[Use], num_places: int
) -> None:
    assume(fewest_places(order) <= num_places)
    found, _ = fetches_of_step(order, NextUses(order), num_places, ())
    waiting, inside = [*found], set[int]()
    for position, use in enumerate(order):
        while waiting and waiting[0].ready <= position:
            fetch = waiting.pop(0)
            assert fetch.chunk not in inside
            inside -= {fetch.victim}
            inside.add(fetch.chunk)
            assert len(inside) <= num_places
        assert inside.issuperset(use.chunks)
        inside -= set(use.leaves)


@st.composite
def steps_of_a_model(draw: st.DrawFn) -> list[Use]:
    """Uses forward and backward of more chunks than every choice could be tried for."""
    num_chunks = draw(st.integers(3, 12))
    forward = draw(
        st.lists(
            st.sets(st.integers(0, num_chunks - 1), min_size=1, max_size=2),
            min_size=3,
            max_size=40,
        )
    )
    last = {chunk: index for index, chunks in enumerate(reversed(forward)) for chunk in chunks}
    return [
        *(Use(chunks=tuple(sorted(chunks))) for chunks in forward),
        *(
            Use(
                chunks=tuple(sorted(chunks)),
                leaves=tuple(sorted(one for one in chunks if last[one] == index)),
            )
            for index, chunks in enumerate(reversed(forward))
        ),
    ]


@settings(max_examples=60, deadline=None)
@given(order=steps_of_a_model(), num_places=st.integers(2, 8))
def test_long_steps_gather_as_little_as_a_linear_programme_allows(
    order: list[Use], num_places: int
) -> None:
    found, behind = fetches_of_step(order, NextUses(order), num_places, ())
    assert len(found) == optimum(order, num_places)
    assert not behind


def test_a_chunk_that_leaves_is_gathered_again_in_the_next_step() -> None:
    order = [Use(chunks=(0,)), Use(chunks=(1,)), Use(chunks=(1,), leaves=(1,)), Use(chunks=(0,))]
    found = replay(order, 2)
    assert [[one.chunk for one in step] for step in found] == [[1]]


def test_a_step_that_begins_empty_gathers_every_chunk_once_where_all_fit() -> None:
    forward = [Use(chunks=(chunk,)) for chunk in range(5)]
    backward = [Use(chunks=(chunk,), leaves=(chunk,)) for chunk in reversed(range(5))]
    assert num_gathers([*forward, *backward], 5) == 5
    # With two places the last two are still there at the turn: 5 forward, and 3 again.
    assert num_gathers([*forward, *backward], 2) == 8


def test_a_place_can_be_filled_as_soon_as_its_chunk_is_reduced() -> None:
    order = [
        Use(chunks=(0,)), Use(chunks=(1,)), Use(chunks=(1,), leaves=(1,)),
        Use(chunks=(0,), leaves=(0,)), Use(chunks=(2,), leaves=(2,)),
    ]  # fmt: skip
    last = replay(order, 2)[0][-1]
    assert (last.chunk, last.position, last.ready) == (2, 4, 4)


def test_a_chunk_that_no_use_needs_is_evicted_first() -> None:
    order = [Use(chunks=(0,)), Use(chunks=(1,)), Use(chunks=(0,))]
    gathers, behind = fetches_of_step(order, NextUses(order), 2, (0, 7))
    assert [(one.chunk, one.victim) for one in gathers] == [(1, 7)]
    assert behind == {0, 1}


def test_a_chunk_comes_as_soon_as_its_victim_was_used_last() -> None:
    order = [Use(chunks=(chunk,)) for chunk in (0, 1, 1, 2, 1)]
    (*_, last), _ = fetches_of_step(order, NextUses(order), 2, ())
    assert (last.chunk, last.victim, last.ready, last.position) == (2, 0, 1, 3)
