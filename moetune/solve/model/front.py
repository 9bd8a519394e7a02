"""Pareto front of a job's layouts: for every memory of a device the fastest step that it allows.

The table's rows are looked at in the order of their bytes, and those that may not beat the fastest
step so far are left out. Each layout that does is on the front. Steps that save little of the one
before are omitted.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from moetune.domain.training import CudaGraphs, FoldedLayout, LayoutRequest
from moetune.solve.model.pins import contradiction
from moetune.solve.model.search import NOISE, FoldedSearch, PricedLayout
from moetune.solve.model.table import LayoutTable, Node, wholes_in_order


def memory_front(
    search: FoldedSearch, pins: LayoutRequest, graphs: CudaGraphs = "none"
) -> tuple[PricedLayout, ...]:
    """Return the layouts of which none is both as fast and as small as another one.

    In order of memory, whose only limit is the hosts'; what is in host memory takes none of the
    devices'.

    Args:
        graphs: CUDA graphs that layouts may have, too, where the pins name none.

    Raises:
        InputError: the pins break a rule, or no layout obeys the rules.
    """
    graphed = replace(pins, cuda_graphs=pins.cuda_graphs or graphs)
    every = (pins, graphed) if graphed.cuda_graphs not in (pins.cuda_graphs, "none") else (pins,)
    numbers = itertools.count()
    tables = [LayoutTable(search=search, pins=one, numbers=numbers) for one in every]
    front = [*_Sweep(tables).front()]
    if not front:
        raise contradiction(search.space, pins)
    if search.prices is not search.wholes:
        front = [*_falling(front)]
    return tuple(map(search.told, front))


class _Sweep:
    """The tables' rows in the order of their bytes, as far as they may be on the front."""

    def __init__(self, tables: Sequence[LayoutTable]) -> None:
        self._tables, self._search = tables, tables[0].search
        self._worth = float("inf")  # seconds of a step that is on the front, as far as it is found

    def front(self) -> Iterable[PricedLayout]:
        """Return the front, least memory first."""
        front: dict[float, PricedLayout] = {}
        search = self._search
        heap = [
            node
            for table in self._tables
            for node in table.nodes(
                lambda seconds, peak: (peak, seconds), partial(self._cuts, table),
                most_bytes=float("inf"),
            )
        ]  # fmt: skip
        heapq.heapify(heap)
        for (peak, _), _, layout, _ in wholes_in_order(heap, lambda _: True, self._is_worth):
            if search.prices.least(layout) > self._worth or not search.space.is_allowed(layout):
                continue
            priced = search.priced(layout)
            if priced.step.seconds <= self._worth:
                front[peak] = priced  # in place of a slower one of that memory
                self._worth = priced.step.seconds * (1 - NOISE)
        return front.values()

    def _is_worth(self, node: Node) -> bool:
        _, seconds = node.bounds
        return seconds <= self._worth

    def _cuts(self, table: LayoutTable, row: FoldedLayout) -> Iterator[Node]:
        """Yield a row with each cut, ZeRO stage and dispatcher."""
        prices, fitting, pins = self._search.prices, self._search.fitting, table.pins
        rounds = prices.rounds_at_least(row)
        for cut in table.cuts(row):
            passes = prices.least_of_pipeline(cut)  # with the other dispatchers it is longer
            if passes > self._worth:
                continue
            for sharded in table.sharded(cut):
                least = passes + prices.update.least_of_gradients(sharded)
                for seconds, dispatcher in table.ranked(row):
                    layout = sharded.changed(dispatcher=dispatcher)
                    bound, peak = (
                        max(least, seconds * rounds),
                        fitting.least_offloaded(layout, pins),
                    )
                    yield table.node((peak, bound), layout, partial(self._wholes, table, layout))

    def _wholes(self, table: LayoutTable, layout: FoldedLayout) -> Iterator[Node]:
        """Yield a cut with all that may be in host memory, which tells its memory."""
        fitting, prices, pins = self._search.fitting, self._search.prices, table.pins
        passes = prices.least_of_passes(layout)
        for share in fitting.shares(layout, pins):
            seconds = passes + prices.update.optimizer_seconds(layout, share)
            if seconds > self._worth:
                continue
            for whole in fitting.waiting(layout, share, pins):
                peak, host = self._search.memory.needs(whole)
                if host <= fitting.host_bytes:
                    yield table.node((peak, seconds), whole)


def _falling(found: Sequence[PricedLayout]) -> Iterator[PricedLayout]:
    """Yield layouts in the order of their own memory, each so much faster than the one before.

    Args:
        found: in the order of the memory that the mean of their layers needs.
    """
    worth = float("inf")
    for one in sorted(found, key=_size):
        if one.step.seconds <= worth:
            yield one
            worth = one.step.seconds * (1 - NOISE)


def _size(one: PricedLayout) -> tuple[float, float]:
    return one.memory.peak_bytes, one.step.seconds
