"""The cache of chunks: no other way to evict gathers less (Belady), by linear programming.

Between two uses of a chunk it either stays in its place or is gathered again. What stays takes a
place at all uses in between, and there are only so many: intervals on a line, whose constraint
matrix is totally unimodular, so that the linear programme has a whole-numbered optimum. Nothing
of it is shared with the runtime or the planner, which evict by Belady's rule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import lil_array

from moetune.domain.chunks import FEWEST_PLACES, Use
from moetune.runtime.sharded.cache import Cache

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
    solution = linprog(-np.ones(len(inner)), A_ub=covers.tocsr(), b_ub=room, bounds=(0, 1))
    num_in_flight = len(gaps) - len(inner) + round(float(-solution.fun))
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


class Chunk:
    """Stands for chunks of FSDP2, of which it gathers and frees nothing."""

    num_bytes, num_running, is_open = 1, 0, False

    def __init__(self, number: int) -> None:
        self.number, self.is_freed = number, True

    def gather(self) -> None:
        self.is_freed = False

    def finish(self) -> None:
        assert not self.is_freed

    def free(self) -> None:
        assert not self.num_running
        self.is_freed = True


def recorded(uses: Sequence[Use]) -> list[Use]:
    """Return uses as a cache records them: modules within others are called one after another."""
    order: list[Use] = []
    for use in uses:
        for number in range(1, len(use.chunks) + 1):
            called = Use(chunks=use.chunks[:number])
            if not order or order[-1].chunks != called.chunks or order[-1].leaves:
                order.append(called)
        order[-1] = replace(order[-1], leaves=use.leaves)
    return order


def run_step(cache: Cache, order: Sequence[Use]) -> Iterator[int]:
    """Call the modules of a step, and yield the gathers behind each call."""
    cache.begin_step()
    for use in order:
        *around, last = (cache.chunks[number] for number in use.chunks)
        for chunk in around:
            chunk.num_running = 1
        cache.use(last, "a module", is_training=True)
        inside = [chunk.number for chunk in cache.chunks if not chunk.is_freed]
        assert set(use.chunks) <= set(inside)
        assert len(inside) <= cache.capacity
        yield cache.num_gathers
        for chunk in around:
            chunk.num_running = 0
        for number in use.leaves:
            cache.chunks[number].free()


def cache_of(order: Sequence[Use], num_places: int) -> Cache:
    """Return a cache that knows the order, and has nothing inside."""
    chunks: Any = [Chunk(number) for number in range(1 + max(max(use.chunks) for use in order))]
    return Cache(chunks, num_places, order=tuple(order))


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
                leaves=tuple(sorted(chunk for chunk in chunks if last[chunk] == index)),
            )
            for index, chunks in enumerate(reversed(forward))
        ),
    ]


@settings(max_examples=150, deadline=None)
@given(uses=orders() | steps_of_a_model(), num_places=st.integers(2, 8))
def test_no_other_way_to_evict_gathers_less_in_any_number_of_steps(
    uses: list[Use], num_places: int
) -> None:
    order = recorded(uses)
    assume(max(FEWEST_PLACES, *(len(set(use.chunks)) for use in order)) <= num_places)
    cache = cache_of(order, num_places)
    for number in range(1, STEPS + 1):
        *_, gathers = run_step(cache, order)
        assert gathers == fewest_gathers(order * number, num_places)


def test_a_chunk_comes_as_soon_as_another_has_left() -> None:
    order = [
        Use(chunks=(0,)), Use(chunks=(1,)), Use(chunks=(1,), leaves=(1,)),
        Use(chunks=(0,), leaves=(0,)), Use(chunks=(2,), leaves=(2,)),
    ]  # fmt: skip
    order = recorded(order)
    cache = cache_of(order, 2)
    assert [*run_step(cache, order)] == [2, 2, 3, 3]


def test_a_chunk_comes_as_soon_as_its_victim_was_used_last() -> None:
    order = recorded([Use(chunks=(chunk,)) for chunk in (0, 1, 2, 1)])
    cache = cache_of(order, 2)
    assert [*run_step(cache, order)] == [2, 3, 3, 3]
