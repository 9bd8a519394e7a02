"""The fastest layouts that fit: the table's rows in the order of their seconds.

Only what is near the best is cut, held against the memory, and played. The answer is that of
playing all.
"""

from collections.abc import Callable, Iterator

from moetune.domain.cluster import HEADROOM
from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.table import LayoutTable, Node, wholes_in_order
from moetune.solve.joint.ties import Leaders, PricedLayout


def best_layouts(search: FoldedSearch, pins: LayoutRequest) -> list[PricedLayout]:
    """Return the fastest layouts that fit, best first; where none does, the smallest.

    Raises:
        InputError: the pins break a rule, or no layout obeys the rules.
    """
    return BestLayouts(search, pins).ranked()


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
            if search.keeps(node.layout) and search.space.is_allowed(node.layout):
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
