"""The cache of chunks: no other way to evict gathers less (Belady), by linear programming.

Between two uses of a chunk it either stays in its place or is gathered again. What stays takes a
place at all uses in between, and there are only so many: intervals on a line, whose constraint
matrix is totally unimodular, so that the linear programme has a whole-numbered optimum. Nothing
of it is shared with the runtime or the planner, which evict by Belady's rule.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import lil_array

from moetune.domain.chunks import FEWEST_PLACES, Use
from moetune.runtime.sharded.cache import Fetch, NextUses, fetches_of_step

STEPS = 4


def fewest_gathers(order: Sequence[Use], num_places: int) -> int:
    """Return the fewest gathers of uses that begin with an empty cache.

    Args:
        order: what each use needs, and what leaves after it, to be gathered again.
    """
    gaps = list(_gaps(order))
    demands = sum(len(set(use.chunks)) for use in order)
    inner = [gap for gap in gaps if gap[1] - gap[0] > 1]
    if not inner:
        return demands - len(gaps)
    covers = lil_array((len(order), len(inner)))
    for column, (begin, end) in enumerate(inner):
        for row in range(begin + 1, end):
            covers[row, column] = 1
    room = np.array([num_places - len(set(use.chunks)) for use in order])
    found = linprog(-np.ones(len(inner)), A_ub=covers.tocsr(), b_ub=room, bounds=(0, 1))
    num_in_flight = len(gaps) - len(inner) + round(float(-found.fun))
    return demands - num_in_flight


def _gaps(order: Sequence[Use]) -> Iterator[tuple[int, int]]:
    """Yield the uses before and after every time in which a chunk could stay."""
    last: dict[int, int] = {}
    for position, use in enumerate(order):
        for chunk in set(use.chunks):
            if chunk in last:
                yield last[chunk], position
            last[chunk] = position
        for chunk in use.leaves:
            last.pop(chunk, None)


def fewest_places(order: list[Use]) -> int:
    return max(FEWEST_PLACES, *(len(set(use.chunks)) for use in order))


def fetched(order: list[Use], num_places: int) -> list[Sequence[Fetch]]:
    """Return the gathers of each of some steps, the first of which begins with an empty cache."""
    uses, cache = NextUses(order), frozenset[int]()
    steps: list[Sequence[Fetch]] = []
    for _ in range(STEPS):
        gathers, cache = fetches_of_step(order, uses, num_places, cache)
        steps.append(gathers)
    return steps


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
            st.sets(st.integers(0, num_chunks - 1), min_size=1, max_size=2), min_size=3, max_size=40
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


@settings(max_examples=150, deadline=None)
@given(order=orders() | steps_of_a_model(), num_places=st.integers(2, 8))
def test_no_other_way_to_evict_gathers_less_in_any_number_of_steps(
    order: list[Use], num_places: int
) -> None:
    assume(fewest_places(order) <= num_places)
    steps = fetched(order, num_places)
    for number in range(1, STEPS + 1):
        found = sum(map(len, steps[:number]))
        assert found == fewest_gathers(order * number, num_places)


def test_a_place_can_be_filled_as_soon_as_its_chunk_has_left() -> None:
    order = [
        Use(chunks=(0,)), Use(chunks=(1,)), Use(chunks=(1,), leaves=(1,)),
        Use(chunks=(0,), leaves=(0,)), Use(chunks=(2,), leaves=(2,)),
    ]  # fmt: skip
    last = fetched(order, 2)[-1][-1]
    assert (last.chunk, last.position, last.ready) == (2, 4, 3)


def test_a_chunk_that_no_use_needs_is_evicted_first() -> None:
    order = [Use(chunks=(0,)), Use(chunks=(1,)), Use(chunks=(0,))]
    gathers, behind = fetches_of_step(order, NextUses(order), 2, (0, 7))
    assert [(one.chunk, one.victim) for one in gathers] == [(1, 7)]
    assert behind == {0, 1}


def test_a_chunk_comes_as_soon_as_its_victim_was_used_last() -> None:
    order = [Use(chunks=(chunk,)) for chunk in (0, 1, 1, 2, 1)]
    (*_, last), _ = fetches_of_step(order, NextUses(order), 2, ())
    assert (last.chunk, last.victim, last.ready, last.position) == (2, 0, 1, 3)
