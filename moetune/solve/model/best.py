"""The fastest layouts that fit: rows in order of their seconds, simulated if near the best."""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter

from moetune.domain.cluster import HEADROOM
from moetune.domain.pipeline import SCHEDULES
from moetune.domain.training import TOKEN_DISPATCHERS, FoldedLayout, LayoutRequest
from moetune.solve.model.pipeline import least_seconds
from moetune.solve.model.rank_memory import ERROR_SHARE
from moetune.solve.model.search import (
    NOISE,
    FoldedSearch,
    LayoutTable,
    Node,
    PricedLayout,
    sizes_of,
    wholes_in_order,
)

NUM_ALTERNATIVES = 5
MOST_LOST = 0.1
"""Share of a step that the room for memory errors may cost; a tenth of runs would need the room."""
_seconds = attrgetter("step.seconds")


class BestLayouts:
    """The fastest layouts that fit; each question continues the search as far as it needs."""

    def __init__(self, search: FoldedSearch, pins: LayoutRequest) -> None:
        self.search, self._table = search, LayoutTable.of(search, pins)
        self._leaders = Leaders(roomy_bytes=search.limit_bytes * (1 - HEADROOM))
        self._heap = self._table.nodes(
            lambda seconds, peak: (seconds, peak), self._cuts, most_bytes=search.limit_bytes
        )

    @classmethod
    def of(cls, search: FoldedSearch, pins: LayoutRequest) -> "BestLayouts":
        """Return the layouts for these pins, with the progress of earlier questions."""
        return search.remembered(pins, lambda: cls(search, pins))

    def best(self) -> PricedLayout:
        """Return the best layout, else the smallest; InputError if no layout obeys the pins."""
        self._run(lambda: self._leaders.tie_limit)
        return self._answers()[0]

    def best_below(self, seconds: float) -> PricedLayout | None:
        """Return the best layout if it fits and is faster than `seconds`; else None."""
        self._run(lambda: min(self._leaders.tie_limit, seconds))
        if not self._leaders.of_sizes:
            return None
        best = self._answers()[0]
        return best if best.step.seconds < seconds else None

    def ranked(self) -> list[PricedLayout]:
        """Return the best layout, as `best` does, and the best of other sizes."""
        self._run(lambda: self._leaders.limit)
        return self._answers()

    def _run(self, limit: Callable[[], float]) -> None:
        """Search until no remaining layout may be within the limit."""
        search, leaders = self.search, self._leaders
        wholes = wholes_in_order(
            self._heap,
            is_open=lambda node: node.bounds[0] <= limit(),
            is_worth=lambda node: node.bounds[0] <= leaders.limit_of(node.layout),
        )
        for node in wholes:
            if search.fits(node.layout) and search.space.is_allowed(node.layout):
                leaders.add(search.price(node.layout))

    def _cuts(self, row: FoldedLayout) -> Iterator[Node]:
        """Yield a row with each cut of its stages."""
        for cut in self._table.cuts(row):
            bound = least_seconds(self.search.prices.pipeline(cut))  # of the fastest dispatcher
            yield self._table.node((bound, 0.0), cut, partial(self._wholes, cut))

    def _wholes(self, cut: FoldedLayout) -> Iterator[Node]:
        """Yield a cut's layouts that may fit, up to the first ZeRO stage with memory to spare."""
        search, table = self.search, self._table
        rounds, limit = search.prices.rounds_at_least(cut), self._leaders.limit_of(cut)
        for sharded in filter(self._may_fit, table.zero_stages(cut)):
            for seconds, _, dispatcher in table.dispatchers(cut):
                if seconds * rounds > limit:
                    break
                layout = sharded.changed(dispatcher=dispatcher)
                bounds = search.prices.least(layout), 0.0
                yield table.node(bounds, layout, partial(self._fitted, layout))
            if search.fitting.is_roomy(sharded):
                break

    def _may_fit(self, layout: FoldedLayout) -> bool:
        """Return whether a layout may fit with the dispatcher that takes least memory."""
        plain = layout.changed(dispatcher="all_to_all")  # other dispatchers may have buffers
        fitting, pins = self.search.fitting, self._table.pins
        return fitting.least_offloaded(plain, pins) <= fitting.limit_bytes

    def _fitted(self, layout: FoldedLayout) -> Iterator[Node]:
        """Yield a layout as it fits; offloading to the host never saves time."""
        for whole in self.search.fitting.fitting_layouts(layout, self._table.pins):
            yield self._table.node((self.search.prices.least(whole), 0.0), whole)

    def _answers(self) -> list[PricedLayout]:
        if self._leaders.of_sizes:
            return list(map(self.search.answer_of, self._leaders.ranked()))
        return [self.search.answer_of(self.search.price(self._table.smallest()))]


def with_room(search: FoldedSearch, pins: LayoutRequest) -> FoldedSearch:
    """Return the search for layouts that leave room for errors, or `search` if that costs too much.

    The room is left only if a layout fits with it and the best step gets longer by at most
    `MOST_LOST`. It must not force the best layout into host memory.
    """
    roomy = search.remembered("with room", lambda: replace(search, error_share=ERROR_SHARE))
    best, layouts = BestLayouts.of(roomy, pins).best(), BestLayouts.of(search, pins)
    if not roomy.fits(best.layout) or layouts.best_below(best.step.seconds / (1 + MOST_LOST)):
        return search
    needs_host = best.layout.on_host > 0 and not layouts.best().layout.on_host
    return search if needs_host else roomy


@dataclass(slots=True)
class Leaders:
    """The fastest layouts of each of the leading sizes, with all that tie with them.

    Args:
        roomy_bytes: largest memory with which a layout wins a tie.
        limit: seconds above which no layout changes the answer.
        tie_limit: seconds above which no layout ties with the best.
    """

    roomy_bytes: float
    of_sizes: dict[tuple[int, ...], list[PricedLayout]] = field(default_factory=dict)
    limit: float = float("inf")
    tie_limit: float = float("inf")

    def limit_of(self, layout: FoldedLayout) -> float:
        """Return the seconds above which a layout does not tie with the best of its sizes."""
        tied = self.of_sizes.get(sizes_of(layout))
        return float("inf") if tied is None else tied[0].step.seconds * (1 + NOISE)

    def add(self, priced: PricedLayout) -> None:
        """Add a layout to those of its sizes, if it ties with them or is faster."""
        sizes = sizes_of(priced.layout)
        self.of_sizes[sizes] = _tied([*self.of_sizes.get(sizes, ()), priced])
        fastest = heapq.nsmallest(
            1 + NUM_ALTERNATIVES, (tied[0].step.seconds for tied in self.of_sizes.values())
        )
        self.tie_limit = fastest[0] * (1 + NOISE)
        if len(fastest) > NUM_ALTERNATIVES:
            self.limit = fastest[-1] * (1 + NOISE)

    def ranked(self) -> list[PricedLayout]:
        """Return the simplest layout that ties with the best, and the best of other sizes."""
        tied = _tied([priced for of_size in self.of_sizes.values() for priced in of_size])
        first = min(tied, key=self._complexity)
        rivals = (
            min(of_size, key=self._complexity)
            for sizes, of_size in self.of_sizes.items()
            if sizes != sizes_of(first.layout)
        )
        return [first, *heapq.nsmallest(NUM_ALTERNATIVES, rivals, key=_seconds)]

    def _complexity(self, priced: PricedLayout) -> tuple[float, ...]:
        """Return the features that a layout could do without, the heaviest first; then its time."""
        layout = priced.layout
        return (
            layout.on_host > 0, priced.memory.peak_bytes > self.roomy_bytes,
            layout.on_host, layout.zero, len(layout.recompute), layout.overlap != "none",
            TOKEN_DISPATCHERS.index(layout.dispatcher), SCHEDULES.index(layout.order), layout.vpp,
            layout.stages is not None,
            sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp)),
            priced.step.seconds,
        )  # fmt: skip


def _tied(layouts: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Return the layouts within noise of the fastest, the fastest first."""
    limit = min(map(_seconds, layouts)) * (1 + NOISE)
    return sorted((priced for priced in layouts if priced.step.seconds <= limit), key=_seconds)
