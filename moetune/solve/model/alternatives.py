"""Alternatives to the answer of a question: CUDA graphs, other flags, other memory.

Each alternative is the answer of a search, so changing the flag gives exactly the named layout. The
front is the fastest step for every amount of device memory. Rows of the table are visited in order
of their bytes, and rows that cannot beat the fastest step so far are left out.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from moetune.domain.training import CudaGraphs, FoldedLayout, LayoutRequest
from moetune.solve.model.best import BestLayouts
from moetune.solve.model.pins import contradiction
from moetune.solve.model.pipeline import least_seconds
from moetune.solve.model.search import (
    NOISE,
    FoldedSearch,
    LayoutTable,
    Node,
    PricedLayout,
    wholes_in_order,
)
from moetune.solve.model.uncertainty import LAYOUT_SPREAD

WORTH_GRAPHS = LAYOUT_SPREAD
"""Least share of a step that graphs must save; less is within the error of either price."""
ROOM_FOR_GRAPHS = 0.1
"""Share of the memory limit that a layout with graphs leaves free. Runs with partial graphs took 6
to 20 % more than predicted, because the prediction lacks their pools
(docs/results/public-runs.md)."""
LEAST_SAVED = 0.02
"""Least saved share of a step that is worth mentioning."""
_WAITED = 0.1
"""Least share of a step spent waiting for replicas at which a plan suggests ways to hide it."""


def with_graphs(
    search: FoldedSearch, pins: LayoutRequest, plain: PricedLayout
) -> BestLayouts | None:
    """Return the layouts whose graphs save most over the plain best; None if none is worth it."""
    if pins.cuda_graphs is not None or search.site is None or not search.fits(plain.layout):
        return None
    most_bytes = search.limit_bytes * (1 - ROOM_FOR_GRAPHS)
    fastest, step_seconds = None, plain.step.seconds
    for graphs in search.target.tried_graphs(search.site, search.job.dtype):
        graphed, most = replace(pins, cuda_graphs=graphs), step_seconds * (1 - WORTH_GRAPHS)
        layouts = BestLayouts.of(search, graphed)
        best = layouts.best_below(most)
        if best is not None and best.memory.peak_bytes > most_bytes:
            roomy = replace(search, limit_bytes=most_bytes, error_share=0.0)
            layouts = BestLayouts(roomy, graphed)
            best = layouts.best_below(most)
        if best is not None:
            fastest, step_seconds = layouts, best.step.seconds
    return fastest


def as_graphed(pins: LayoutRequest, layout: FoldedLayout) -> LayoutRequest:
    """Return the pins, with the layout's CUDA graphs if they pin none."""
    return pins if pins.cuda_graphs else replace(pins, cuda_graphs=layout.cuda_graphs)


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterLayout:
    """A faster layout, the pins that lead to it, and the pins that it drops."""

    change: LayoutRequest = field(default_factory=LayoutRequest)
    left_out: LayoutRequest = field(default_factory=LayoutRequest)
    priced: PricedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Layouts faster than a search's answer.

    Args:
        pins: pins that the answer obeys.
        best: the answer, which fits.
    """

    search: FoldedSearch
    pins: LayoutRequest
    best: PricedLayout

    def free(self) -> FasterLayout | None:
        """Return the best layout without any pins; None if it is not faster."""
        if not self.pins.pinned:
            return None
        free = LayoutRequest()
        plain = BestLayouts.of(self.search, free).best()
        graphed = with_graphs(self.search, free, plain)
        best = plain if graphed is None else graphed.best()
        return FasterLayout(priced=best) if best.step.seconds < self._most else None

    def of_flags(self) -> list[FasterLayout]:
        """Return faster layouts with one flag changed, or with more memory, the fastest first."""
        savings = []
        for name, pins in self._questions():
            best = BestLayouts.of(self.search, pins).best_below(self._most)
            if best is not None:
                savings.append(self._changed(best, name))
        savings += self._beyond_memory()
        return sorted(savings, key=lambda saving: saving.priced.step.seconds)

    def _questions(self) -> Iterator[tuple[str, LayoutRequest]]:
        """Yield each pinned field with the pins without it, then each other kind of CUDA graphs."""
        for name in self.pins.pinned:
            if name != "cuda_graphs":
                yield name, as_graphed(self.pins.without([name]), self.best.layout)
        for graphs in self.search.target.cuda_graphs:
            if graphs != self.best.layout.cuda_graphs:
                yield "cuda_graphs", replace(self.pins, cuda_graphs=graphs)

    def _beyond_memory(self) -> Iterator[FasterLayout]:
        """Yield faster layouts that differ in a single flag and do not fit.

        The first recomputes nothing. If collectives of gradients and parameters bind, the others
        shard fewer states, or hide the collectives behind a larger micro-batch.
        """
        layout = self.best.layout
        changes: list[tuple[str, Any]] = [("recompute", ())] if layout.recompute else []
        if self._waits_for_replicas:
            fewer = [stage for stage in self.search.target.zero if 1 <= stage < layout.zero]
            changes += [("zero", stage) for stage in fewer[-1:]]
            changes.append(("micro_batch", 2 * layout.micro_batch))
        for name, value in changes:
            if getattr(self.pins, name) is None:
                values: dict[str, Any] = {name: value}
                yield from self._if_only_memory_lacks(layout.changed(degree=None, **values), name)

    @property
    def _waits_for_replicas(self) -> bool:
        step = self.best.step
        waited = step.bound_by_replicas + step.parts["gradients"]
        return waited >= _WAITED * step.seconds

    def _if_only_memory_lacks(self, layout: FoldedLayout, name: str) -> Iterator[FasterLayout]:
        if not self.search.space.is_allowed(layout):
            return
        priced = self.search.price(layout)
        if priced.step.seconds < self._most and not self.search.fits(layout):
            yield self._changed(priced, name)

    def _changed(self, priced: PricedLayout, name: str) -> FasterLayout:
        """Return the layout with its value of the field pinned; without a value, drop the pin."""
        value: dict[str, Any] = {name: getattr(priced.layout, name)}
        if value[name] is None:
            return FasterLayout(left_out=self.pins.only(name), priced=priced)
        return FasterLayout(change=LayoutRequest(**value), priced=priced)

    @property
    def _most(self) -> float:
        return self.best.step.seconds * (1 - LEAST_SAVED)


def memory_front(
    search: FoldedSearch, pins: LayoutRequest, graphs: CudaGraphs = "none"
) -> tuple[PricedLayout, ...]:
    """Return the layouts that no other layout beats in both speed and memory, by memory.

    Only the host's memory is a limit; bytes offloaded to it do not count on the device.

    Args:
        graphs: CUDA graphs that layouts may also have, if the pins name none.

    Raises:
        InputError: the pins break a rule, or no layout obeys the rules.
    """
    has_graphs = pins.cuda_graphs is None and graphs != "none"
    questions = [pins, replace(pins, cuda_graphs=graphs)] if has_graphs else [pins]
    front = [*_Sweep([LayoutTable.of(search, asked) for asked in questions]).front()]
    if not front:
        raise contradiction(search.space, pins)
    if search.prices is not search.wholes:
        front = [*_falling(front)]
    return tuple(map(search.answer_of, front))


class _Sweep:
    """The tables' rows in the order of their bytes, limited to rows that may be on the front."""

    def __init__(self, tables: Sequence[LayoutTable]) -> None:
        self._tables, self._search = tables, tables[0].search
        self._worth = float("inf")  # seconds that a step has to beat to join the front

    def front(self) -> Iterable[PricedLayout]:
        """Return the front, the least memory first."""
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
        for (peak, _), _, layout, _ in wholes_in_order(
            heap, is_open=lambda _: True, is_worth=lambda node: node.bounds[1] <= self._worth
        ):
            if search.prices.least(layout) > self._worth or not search.space.is_allowed(layout):
                continue
            priced = search.price(layout)
            if priced.step.seconds <= self._worth:
                front[peak] = priced  # replaces a slower layout with equal memory
                self._worth = priced.step.seconds * (1 - NOISE)
        return front.values()

    def _cuts(self, table: LayoutTable, row: FoldedLayout) -> Iterator[Node]:
        """Yield a row with each cut, ZeRO stage and dispatcher."""
        prices, fitting, pins = self._search.prices, self._search.fitting, table.pins
        rounds = prices.rounds_at_least(row)
        for cut in table.cuts(row):
            passes = least_seconds(prices.pipeline(cut))  # other dispatchers take longer
            if passes > self._worth:
                continue
            for sharded in table.zero_stages(cut):
                least = passes + prices.least_of_gradients(sharded)
                for seconds, _, dispatcher in table.dispatchers(row):
                    layout = sharded.changed(dispatcher=dispatcher)
                    bound, peak = (
                        max(least, seconds * rounds),
                        fitting.least_offloaded(layout, pins),
                    )
                    yield table.node((peak, bound), layout, partial(self._wholes, table, layout))

    def _wholes(self, table: LayoutTable, layout: FoldedLayout) -> Iterator[Node]:
        """Yield a cut with each choice of host memory, which determines its device memory."""
        fitting, prices, pins = self._search.fitting, self._search.prices, table.pins
        passes = prices.least_of_passes(layout)
        for share in fitting.shares(layout, pins):
            seconds = passes + prices.optimizer_seconds(layout, share)
            if seconds > self._worth:
                continue
            for whole in fitting.with_each_offload(layout, share, pins):
                peak, host = fitting.memory.needs(whole)
                if host <= fitting.host_bytes:
                    yield table.node((peak, seconds), whole)


def _falling(layouts: Sequence[PricedLayout]) -> Iterator[PricedLayout]:
    """Yield layouts in order of memory, each faster than the previous layout by more than noise."""
    worth = float("inf")
    by_size = sorted(layouts, key=lambda row: (row.memory.peak_bytes, row.step.seconds))
    for priced in by_size:
        if priced.step.seconds <= worth:
            yield priced
            worth = priced.step.seconds * (1 - NOISE)
