"""The fastest layouts that fit: the table's rows in the order of their seconds.

Only what is near the best is cut, held against the memory, and played. The answer is that of
playing all. Of CUDA graphs those of a runtime's own recipes are tried beside it.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from moetune.domain.cluster import HEADROOM
from moetune.domain.pipeline import SCHEDULES
from moetune.domain.training import TOKEN_DISPATCHERS, FoldedLayout, LayoutRequest
from moetune.solve.model.search import NOISE, FoldedSearch, PricedLayout
from moetune.solve.model.table import LayoutTable, Node, wholes_in_order
from moetune.solve.model.uncertainty import OWN_SPREAD

NUM_ALTERNATIVES = 5
WORTH_GRAPHS = OWN_SPREAD
"""Of a step, what graphs save at least: less is within the error of either price."""
ROOM_FOR_GRAPHS = 0.1
"""Of the memory limit, what a layout with graphs leaves free. Runs with graphs of parts took 6 to
20 % more than predicted, which has no pools of theirs (docs/results/public-runs.md)."""


class BestLayouts:
    """The fastest layouts that fit, searched as far as they are asked for."""

    def __init__(self, search: FoldedSearch, pins: LayoutRequest) -> None:
        self.search, self._table = search, LayoutTable(search=search, pins=pins)
        self._leaders = Leaders(roomy_bytes=search.limit_bytes * (1 - HEADROOM))
        self._heap = self._table.nodes(
            lambda seconds, peak: (seconds, peak), self._wholes, most_bytes=search.limit_bytes
        )

    @classmethod
    def of(cls, search: FoldedSearch, pins: LayoutRequest) -> "BestLayouts":
        """Return those of pins, as far as they were searched for an earlier question."""
        if pins not in search.answers:
            search.answers[pins] = cls(search, pins)
        found: BestLayouts = search.answers[pins]
        return found

    def best(self) -> PricedLayout:
        """Return the best one; where none fits, the smallest.

        Raises:
            InputError: the pins break a rule, or no layout obeys the rules.
        """
        self._run(lambda: self._leaders.tie_limit)
        return self._told()[0]

    def best_below(self, seconds: float) -> PricedLayout | None:
        """Return the best one if it is faster than this; None where none is that fits.

        Raises:
            InputError: as of `best`.
        """
        self._run(lambda: min(self._leaders.tie_limit, seconds))
        if not self._leaders.found:
            return None
        best = self._told()[0]
        return best if best.step.seconds < seconds else None

    def ranked(self) -> list[PricedLayout]:
        """Return the best one and the best of other sizes; where none fits, the smallest.

        Raises:
            InputError: as of `best`.
        """
        self._run(lambda: self._leaders.limit)
        return self._told()

    def _run(self, limit: Callable[[], float]) -> None:
        """Search until nothing is left that may be within the limit."""
        search, leaders = self.search, self._leaders
        wholes = wholes_in_order(
            self._heap,
            is_open=lambda node: node.bounds[0] <= limit(),
            is_worth=lambda node: node.bounds[0] <= leaders.limit_of(node.layout),
        )
        for node in wholes:
            if search.fits(node.layout) and search.space.is_allowed(node.layout):
                leaders.add(search.priced(node.layout))

    def _wholes(self, row: FoldedLayout) -> Iterator[Node]:
        """Yield the layouts of a row that fit.

        Higher ZeRO stages take no less time: those behind one that leaves memory free are not
        tried.
        """
        search, table = self.search, self._table
        rounds, limit = search.prices.rounds_at_least(row), self._leaders.limit_of(row)
        for cut in table.cuts(row):
            for sharded in table.sharded(cut):
                for seconds, dispatcher in table.ranked(row):
                    if seconds * rounds > limit:
                        break
                    layout = sharded.changed(dispatcher=dispatcher)
                    for whole in search.fitting.fitted(layout, table.pins):
                        yield table.node((search.prices.least(whole), 0.0), whole)
                if search.fitting.is_roomy(sharded):
                    break

    def _told(self) -> list[PricedLayout]:
        if self._leaders.found:
            return list(map(self.search.told, self._leaders.ranked()))
        return [self.search.told(self.search.priced(self._table.smallest()))]


def with_graphs(
    search: FoldedSearch, pins: LayoutRequest, plain: PricedLayout
) -> BestLayouts | None:
    """Return the layouts with the graphs that save most; None where none saves enough.

    Args:
        plain: the best layout without graphs.

    Raises:
        InputError: as of `BestLayouts.best`.
    """
    if pins.cuda_graphs is not None or search.site is None or not search.fits(plain.layout):
        return None
    most_bytes = search.limit_bytes * (1 - ROOM_FOR_GRAPHS)
    found, step_seconds = None, plain.step.seconds
    for graphs in search.target.tried_graphs(search.site, search.job.dtype):
        graphed, most = replace(pins, cuda_graphs=graphs), step_seconds * (1 - WORTH_GRAPHS)
        layouts = BestLayouts.of(search, graphed)
        best = layouts.best_below(most)
        if best is not None and best.memory.peak_bytes > most_bytes:
            layouts = BestLayouts(replace(search, limit_bytes=most_bytes), graphed)
            best = layouts.best_below(most)
        if best is not None:
            found, step_seconds = layouts, best.step.seconds
    return found


def as_graphed(pins: LayoutRequest, layout: FoldedLayout) -> LayoutRequest:
    """Return pins with a layout's CUDA graphs, where they pin none."""
    return pins if pins.cuda_graphs else replace(pins, cuda_graphs=layout.cuda_graphs)


@dataclass(slots=True)
class Leaders:
    """The fastest layouts of each of the sizes that lead, with those that tie with them.

    Args:
        roomy_bytes: that a layout takes at most where it wins a tie.
        limit: seconds above which no layout changes the answer.
        tie_limit: seconds above which no layout ties with the best.
    """

    roomy_bytes: float
    found: dict[tuple[int, ...], list[PricedLayout]] = field(default_factory=dict)
    limit: float = float("inf")
    tie_limit: float = float("inf")

    def limit_of(self, layout: FoldedLayout) -> float:
        """Return the seconds above which a layout does not tie with the best of its sizes."""
        tied = self.found.get(_ranks(layout))
        return float("inf") if tied is None else tied[0].step.seconds * (1 + NOISE)

    def add(self, one: PricedLayout) -> None:
        """Take a layout among those of its sizes, if it ties with them or is faster."""
        key = _ranks(one.layout)
        tied = _tied([*self.found.get(key, ()), one])
        self.found[key] = sorted(tied, key=_seconds)
        fastest = heapq.nsmallest(
            1 + NUM_ALTERNATIVES, (_seconds(tied[0]) for tied in self.found.values())
        )
        self.tie_limit = fastest[0] * (1 + NOISE)
        if len(fastest) > NUM_ALTERNATIVES:
            self.limit = fastest[-1] * (1 + NOISE)

    def ranked(self) -> list[PricedLayout]:
        """Return the simplest of those that tie with the best, and the best of other sizes."""
        near = dict(self.found)
        first = min(_tied([one for tied in near.values() for one in tied]), key=self._order)
        del near[_ranks(first.layout)]
        others = (min(tied, key=self._order) for tied in near.values())
        return [first, *heapq.nsmallest(NUM_ALTERNATIVES, others, key=_seconds)]

    def _order(self, one: PricedLayout) -> tuple[float, ...]:
        return (
            one.layout.on_host > 0, one.memory.peak_bytes > self.roomy_bytes, *_complexity(one)
        )  # fmt: skip


def _seconds(one: PricedLayout) -> float:
    return one.step.seconds


def _ranks(layout: FoldedLayout) -> tuple[int, ...]:
    """Return what layouts share that differ in stages, dispatcher, overlap and recomputation."""
    return layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.micro_batch


def _tied(among: Sequence[PricedLayout]) -> list[PricedLayout]:
    """Return those within noise of the fastest."""
    limit = min(map(_seconds, among)) * (1 + NOISE)
    return [one for one in among if one.step.seconds <= limit]


def _complexity(one: PricedLayout) -> tuple[float, ...]:
    """Return how much a layout has that can be left out, the heaviest first; then its time."""
    layout = one.layout
    return (
        layout.on_host, layout.zero, len(layout.recompute), layout.overlap != "none",
        TOKEN_DISPATCHERS.index(layout.dispatcher), SCHEDULES.index(layout.order), layout.vpp,
        layout.stages is not None,
        sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp)),
        one.step.seconds,
    )  # fmt: skip
