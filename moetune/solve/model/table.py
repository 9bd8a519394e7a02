"""The table of a question's layouts, and the order in which its rows are looked at.

A group of rows has the sizes of the ranks with each overlap; a row a pipeline and what it
recomputes; and a row's layouts are its cuts, ZeRO stages, dispatchers and shares in host memory.
Groups and rows have the least seconds and bytes of any layout among them, and so questions are
loops over them in the order of seconds or of bytes, which end where no row is worth its price.

Where layers were recorded one by one, bounds are those of their mean, and what is priced has each
layer's own fullest rank: the same sum of rows, so that bounds are off by what kernels' seconds
do not follow rows.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from moetune.domain.once import Tables, once
from moetune.domain.training import FoldedLayout, LayoutRequest, TokenDispatcher
from moetune.solve.model.pins import contradiction
from moetune.solve.model.search import FoldedSearch

Group = Sequence[FoldedLayout]
"""Layouts of the same sizes, with each overlap."""


class Row(NamedTuple):
    """A pipeline that recomputes a list of modules, with the bytes that a device needs at least."""

    layout: FoldedLayout
    peak_bytes: float


class PricedDispatcher(NamedTuple):
    """A dispatcher with the seconds of a micro-batch in the whole model."""

    seconds: float
    dispatcher: TokenDispatcher


class Node(NamedTuple):
    """Layouts of the table that have some things in common.

    Args:
        bounds: least seconds and bytes of any of them, by which nodes are ordered.
        number: a different one for each node.
        layout: with what they have in common; it is whole where there are no `parts`.
        parts: returns what takes its place.
    """

    bounds: tuple[float, float]
    number: int
    layout: FoldedLayout
    parts: Callable[[], Iterable["Node"]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable(Tables):
    """Layouts of a job that obey some pins.

    Args:
        numbers: of nodes, which tables that are looked at together share.
        groups: of rows with the same sizes of the ranks.
        seconds: of each group's fastest layout at least.
    """

    search: FoldedSearch
    pins: LayoutRequest
    numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)
    groups: tuple[Group, ...] = field(init=False)
    seconds: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        space, rounds = self.search.space, self.search.prices.rounds
        groups = tuple(
            tuple(space.overlapped(sizes, self.pins)) for sizes in space.sizes(self.pins)
        )
        object.__setattr__(self, "groups", groups)
        seconds = (min(map(self._at_least, group)) * rounds(group[0]) for group in groups)
        object.__setattr__(self, "seconds", tuple(seconds))

    def rows(self, group: Group, *, may_offload: bool = True) -> Iterator[Row]:
        """Yield the rows of a group.

        Args:
            may_offload: whether what is not pinned may be in host memory.
        """
        space, lists = self.search.space, self.search.space.recomputes(self.pins)
        pipelines = [one for sizes in group for one in space.pipelines(sizes, self.pins)]
        if not pipelines:
            return
        bounds = self.search.fitting.least_bytes(
            pipelines, lists, self.pins, may_offload=may_offload
        )
        for pipeline, row in zip(pipelines, bounds.tolist(), strict=True):
            for modules, peak in zip(lists, row, strict=True):
                if not modules or not space.keeps_all(pipeline):
                    yield Row(pipeline.changed(recompute=modules), peak)

    def nodes(
        self,
        order: Callable[[float, float], tuple[float, float]],
        parts: Callable[[FoldedLayout], Iterable[Node]],
        *,
        most_bytes: float,
    ) -> list[Node]:
        """Return the groups that may take so few bytes, of which the rows take the place.

        Args:
            order: of least seconds and bytes.
            parts: returns what takes the place of a row's layout.
        """

        def rows(group: Group) -> Iterator[Node]:
            for layout, peak in self.rows(group):
                ranked = self.ranked(layout) if peak <= most_bytes else ()
                if ranked:
                    seconds = ranked[0].seconds * self.search.prices.rounds_at_least(layout)
                    yield self.node(order(seconds, peak), layout, partial(parts, layout))

        nodes = []
        for group, seconds in zip(self.groups, self.seconds, strict=True):
            peak = self.search.fitting.least_of_states(group[0], self.pins)
            if peak <= most_bytes:
                nodes.append(self.node(order(seconds, peak), group[0], partial(rows, group)))
        heapq.heapify(nodes)
        return nodes

    def node(
        self,
        bounds: tuple[float, float],
        layout: FoldedLayout,
        parts: Callable[[], Iterable[Node]] | None = None,
    ) -> Node:
        """Return a node with a number of its own."""
        return Node(bounds, next(self.numbers), layout, parts)

    @once(
        lambda layout: (
            layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch,
            layout.overlap, layout.recompute,
        )
    )  # fmt: skip
    def ranked(self, layout: FoldedLayout) -> Sequence[PricedDispatcher]:
        """Return the dispatchers that go with a layout, the fastest first.

        There is none where its overlap does not go with what it recomputes.
        """
        seconds = self.search.prices.micro_batch_seconds
        able = self._able(layout) if self.search.space.may_overlap(layout) else ()
        priced = (PricedDispatcher(seconds(layout.changed(dispatcher=name)), name) for name in able)
        return sorted(priced, key=lambda way: way.seconds)

    def cuts(self, layout: FoldedLayout) -> Sequence[FoldedLayout]:
        """Return a row's layout, where it is allowed, with equal stages and with balanced ones.

        It has the fastest dispatcher, whose times balanced stages are cut by.
        """
        ranked = self.ranked(layout)
        able = layout.changed(dispatcher=ranked[0].dispatcher) if ranked else layout
        if not ranked or not self.search.space.is_allowed(able):
            return ()
        if able.pp == 1 or self.pins.stages is not None:
            return (able,)
        balanced = self.search.prices.balanced(able)
        return (able,) if balanced.stages is None else (able, balanced)

    def sharded(self, cut: FoldedLayout) -> Iterator[FoldedLayout]:
        """Yield a cut with each ZeRO stage that is allowed, the lowest first."""
        space = self.search.space
        for zero in space.zeros(self.pins, cut.pp, cut.tp):
            layout = cut if zero == cut.zero else cut.changed(zero=zero)
            if layout is cut or space.is_allowed(layout):
                yield layout

    def smallest(self) -> FoldedLayout:
        """Return the layout that takes least memory, of equals the fastest by its bound.

        Nothing is in host memory unless it is pinned.

        Raises:
            InputError: the pins break a rule, or no layout obeys the rules.
            RefusedLayoutError: the runtime would refuse every layout that obeys the pins.
        """
        search, least, smallest = self.search, (float("inf"), float("inf")), None
        rows = (row for group in self.groups for row in self.rows(group, may_offload=False))
        for layout, peak in sorted(rows, key=lambda row: row.peak_bytes):
            if peak > least[0]:
                break
            for sharded in (one for cut in self.cuts(layout) for one in self.sharded(cut)):
                size = search.memory.needs(sharded)[0], search.prices.floor(sharded)
                if size < least and search.space.is_allowed(sharded):
                    least, smallest = size, sharded
        if smallest is None:
            raise contradiction(search.space, self.pins)
        return smallest

    def _at_least(self, layout: FoldedLayout) -> float:
        """Return seconds that a micro-batch takes at least, before any chunks are priced.

        That is true of all layouts that recompute as much or more.
        """
        if layout.overlap != "chunks":
            return min((way.seconds for way in self.ranked(layout)), default=float("inf"))
        least = self.search.prices.micro_batch_at_least
        able = self._able(layout)
        return min((least(layout.changed(dispatcher=name)) for name in able), default=float("inf"))

    @once(lambda layout: (layout.tp, layout.ep, layout.etp, layout.overlap))
    def _able(self, layout: FoldedLayout) -> list[TokenDispatcher]:
        return self.search.space.dispatchers(layout, self.pins)


def wholes_in_order(
    heap: list[Node], is_open: Callable[[Node], bool], is_worth: Callable[[Node], bool]
) -> Iterator[Node]:
    """Yield whole layouts in the order of their bounds, as long as the first node is open.

    Args:
        heap: that is searched, which is left with what is not open.
        is_worth: what it refuses is left out for good.
    """
    while heap and is_open(heap[0]):
        node = heapq.heappop(heap)
        if not is_worth(node):
            continue
        if node.parts is None:
            yield node
            continue
        for part in node.parts():
            if is_worth(part):
                heapq.heappush(heap, part)
