"""Pareto front of a job's layouts: for every memory of a device the fastest step that it allows.

The table's rows are looked at in the order of their bytes, and those that may not beat the fastest
step so far are left out. Each layout that does is on the front. Steps that save little of the one
before are omitted.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.solve.joint.pins import contradiction
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.table import LayoutTable, Node, wholes_in_order
from moetune.solve.joint.ties import NOISE, PricedLayout


def memory_front(search: FoldedSearch, pins: LayoutRequest) -> tuple[PricedLayout, ...]:
    """Return the layouts of which none is both as fast and as small as another one.

    In order of memory, whose only limit is the hosts'; what is in host memory takes none of the
    devices'.

    Raises:
        InputError: the pins break a rule, or no layout obeys the rules.
    """
    front = [*_Sweep(LayoutTable(search=search, pins=pins)).front()]
    if not front:
        raise contradiction(search.space, pins)
    if search.apart is not None:
        front = [*_falling(front)]
    return tuple(map(search.told, front))


class _Sweep:
    """The table's rows in the order of their bytes, as far as they may be on the front."""

    def __init__(self, table: LayoutTable) -> None:
        self._table, self._search = table, table.search
        self._worth = float("inf")  # seconds of a step that is on the front, as far as it is found

    def front(self) -> Iterable[PricedLayout]:
        """Return the front, least memory first."""
        front: dict[float, PricedLayout] = {}
        search = self._search
        heap = self._table.nodes(
            lambda seconds, peak: (peak, seconds), self._cuts, most_bytes=float("inf")
        )
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

    def _cuts(self, row: FoldedLayout) -> Iterator[Node]:
        """Yield a row with each cut, ZeRO stage and dispatcher."""
        prices, fitting, pins = self._search.prices, self._search.fitting, self._table.pins
        rounds = prices.rounds_at_least(row)
        for cut in self._table.cuts(row):
            passes = prices.least_of_pipeline(cut)  # with the other dispatchers it is longer
            if passes > self._worth:
                continue
            for sharded in self._table.sharded(cut):
                least = passes + prices.update.least_of_gradients(sharded)
                for seconds, dispatcher in self._table.ranked(row):
                    layout = sharded.changed(dispatcher=dispatcher)
                    bound, peak = (
                        max(least, seconds * rounds),
                        fitting.least_offloaded(layout, pins),
                    )
                    yield self._table.node((peak, bound), layout, partial(self._wholes, layout))

    def _wholes(self, layout: FoldedLayout) -> Iterator[Node]:
        """Yield a cut with all that may be in host memory, which tells its memory."""
        fitting, prices, pins = self._search.fitting, self._search.prices, self._table.pins
        passes = prices.least_of_passes(layout)
        for share in fitting.shares(layout, pins):
            seconds = passes + prices.update.optimizer_seconds(layout, share)
            if seconds > self._worth:
                continue
            for whole in fitting.waiting(layout, share, pins):
                peak, host = self._search.memory.needs(whole)
                if fitting.fits_host(host):
                    yield self._table.node((peak, seconds), whole)


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


def merged(
    front: Sequence[PricedLayout], others: Iterable[PricedLayout]
) -> tuple[PricedLayout, ...]:
    """Return a front with those of other layouts that beat it by more than noise.

    For no memory is it slower than the front. Whatever is left is not both larger and slower than
    another one.
    """
    kept = [*front]
    for one in sorted(others, key=_size):
        within = [two.step.seconds for two in kept if two.memory.peak_bytes <= _size(one)[0]]
        if one.step.seconds < min(within, default=float("inf")) * (1 - NOISE):
            kept.append(one)
    found, worth = [], float("inf")
    for one in sorted(kept, key=_size):
        if one.step.seconds < worth:
            found.append(one)
            worth = one.step.seconds
    return tuple(found)


def _size(one: PricedLayout) -> tuple[float, float]:
    return one.memory.peak_bytes, one.step.seconds
