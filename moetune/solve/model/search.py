"""The table of a question's layouts, with their prices and memory, and the order of its rows.

A group of rows shares the sizes of the ranks, with each overlap. A row is a pipeline with its
recomputed modules. A row's layouts are its cuts, ZeRO stages, dispatchers and shares in host
memory. Groups and rows have lower bounds on seconds and bytes of their layouts. Questions visit
them in order of seconds or of bytes, and end at the first row that cannot improve the answer.

If layers were recorded separately, bounds are those of their mean, and prices use each layer's
fullest rank. Both have the same sum of rows, so bounds err only by kernel times not linear in rows.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from operator import attrgetter
from typing import NamedTuple

from moetune.domain.megatron_rules import RECOMPUTED
from moetune.domain.once import Tables, once_for
from moetune.domain.routing_record import RecordedLayers
from moetune.domain.site import Site
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, LayoutRequest, TokenDispatcher, TrainingJob
from moetune.solve.model.memory import OPTIMIZER_SHARES, MemoryModel
from moetune.solve.model.pins import contradiction
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.rank_memory import RankMemory
from moetune.solve.model.space import Fitting, LayoutSpace
from moetune.solve.model.step import StepPrices, StepSeconds

NOISE = 0.01
"""Steps within it tie: a layout that leaves memory free is taken, then the simpler layout."""
_ROUNDING = 1e-9
"""Difference in a share of the optimizer that rounding in sums of bytes may cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """A layout with its step and fullest rank; only answers have savings and mean parts."""

    layout: FoldedLayout
    step: StepSeconds
    memory: RankMemory
    saved_seconds: float = 0.0
    saved_by_graphs_seconds: float = 0.0
    mean_parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedSearch(Tables):
    """The search over the layouts of a job.

    If layers differ by their routing, bounds, `prices`, `memory` and `job` are of their mean.

    Args:
        wholes: prices of whole layouts, with each layer's routing.
        error_share: share of predicted bytes that fitting layouts leave free.
        numbers: consecutive numbers of nodes.
    """

    wholes: StepPrices
    limit_bytes: float
    site: Site | None
    asks_runtime: bool
    host_bytes: float
    error_share: float = 0.0
    prices: StepPrices = field(init=False)
    memory_of_wholes: MemoryModel = field(init=False, repr=False)
    space: LayoutSpace = field(init=False)
    fitting: Fitting = field(init=False)
    numbers: Iterator[int] = field(init=False, default_factory=itertools.count, repr=False)

    def __post_init__(self) -> None:
        prices = self.wholes
        memory = of_wholes = MemoryModel(
            job=prices.job, stages=prices.stages, target=prices.target, error_share=self.error_share
        )
        if isinstance(prices.job.routing, RecordedLayers):
            job = prices.job.with_mean_layers
            prices = replace(prices, job=job, stages=DecoderStages(job.decoder))
            memory = replace(memory, job=job, stages=prices.stages)
        space = LayoutSpace(
            job=prices.job, target=prices.target, site=self.site, asks_runtime=self.asks_runtime
        )
        fitting = Fitting(
            space=space, memory=memory, limit_bytes=self.limit_bytes, host_bytes=self.host_bytes
        )
        derived = {"prices": prices, "memory_of_wholes": of_wholes, "space": space}
        for name, value in {**derived, "fitting": fitting}.items():
            object.__setattr__(self, name, value)

    @property
    def job(self) -> TrainingJob:
        """The job."""
        return self.prices.job

    @property
    def target(self) -> Target:
        """The runtime."""
        return self.prices.target

    def price(self, layout: FoldedLayout) -> PricedLayout:
        """Return a layout with its price and memory, whether it fits or not."""
        step = self.wholes.step(self._cut(layout))
        return PricedLayout(layout=layout, step=step, memory=self.memory_of_wholes.peak(layout))

    def fits(self, layout: FoldedLayout) -> bool:
        """Return whether a layout fits into the memory of the devices and of their host."""
        return replace(self.fitting, memory=self.memory_of_wholes).fits(layout)

    def _cut(self, layout: FoldedLayout) -> FoldedLayout:
        """Return the layout with the degree that is fastest on the mean of its layers."""
        if layout.overlap != "chunks" or self.prices is self.wholes:
            return layout
        return replace(layout, degree=self.prices.blocks.degree(layout))

    def answer_of(self, priced: PricedLayout) -> PricedLayout:
        """Return an answer with its degree, mean parts, and savings of graphs and overlap."""
        if priced.layout.cuda_graphs != "none":
            launched = self._cut(priced.layout.changed(cuda_graphs="none"))
            saved = self.wholes.step(launched).seconds - priced.step.seconds
            priced = replace(priced, saved_by_graphs_seconds=saved)
        if priced.layout.pp > 1:
            priced = replace(priced, mean_parts=self.wholes.mean_parts(self._cut(priced.layout)))
        if priced.layout.overlap == "none":
            return priced
        plain = replace(priced.layout, overlap="none", degree=None)
        return replace(
            priced,
            layout=replace(priced.layout, degree=self.prices.blocks.degree(priced.layout)),
            saved_seconds=self.wholes.step(plain).seconds - priced.step.seconds,
        )


sizes_of = attrgetter("tp", "cp", "pp", "ep", "etp", "micro_batch")
"""Fields that equal sizes share; stages, dispatcher, overlap and recomputation may differ."""
_BYTES = attrgetter(
    "vpp", "recompute", "overlap", "zero", "schedule", "stages", "offload_activations",
    "offload_optimizer",
)  # fmt: skip
"""Pins on which the bytes of rows depend."""
Group = Sequence[FoldedLayout]
"""Layouts of equal sizes, with each overlap."""


class GroupBounds(NamedTuple):
    """A group with the least seconds of its layouts, with and without launches, and least bytes."""

    group: Group
    seconds: float
    bare_seconds: float
    peak_bytes: float


class Row(NamedTuple):
    """A pipeline with a list of modules that it recomputes.

    Args:
        peak_bytes: least bytes of a device, with the most allowed in host memory.
        alone_bytes: least bytes of a device, with only pinned shares in host memory.
    """

    layout: FoldedLayout
    peak_bytes: float
    alone_bytes: float


class PricedDispatcher(NamedTuple):
    """A dispatcher with a micro-batch's seconds in the whole model, including `launches`."""

    seconds: float
    launches: float
    dispatcher: TokenDispatcher


class Node(NamedTuple):
    """Layouts of the table that share some fields.

    Args:
        bounds: least seconds and bytes of all its layouts; they order nodes.
        layout: layout with the shared fields; it is complete if there are no `parts`.
        parts: returns the nodes that replace it.
    """

    bounds: tuple[float, float]
    number: int
    layout: FoldedLayout
    parts: Callable[[], Iterable["Node"]] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutTable(Tables):
    """Layouts of a job that obey some pins."""

    search: FoldedSearch
    pins: LayoutRequest

    @classmethod
    def of(cls, search: FoldedSearch, pins: LayoutRequest) -> "LayoutTable":
        """Return the table for these pins, with the bounds computed so far."""
        return search.remembered(("table", pins), lambda: cls(search=search, pins=pins))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Groups of rows with the same sizes of the ranks."""
        space = self.search.space
        return tuple(
            tuple(space.with_overlaps(sizes, self.pins)) for sizes in space.sizes(self.pins)
        )

    @cached_property
    def bounds(self) -> Sequence[GroupBounds]:
        """The groups' bounds."""
        return [*map(self._bounds, self.groups)]

    def _bounds(self, group: Group) -> GroupBounds:
        rounds = self.search.job.micro_batches(group[0]) / group[0].pp
        ways = [*itertools.chain.from_iterable(map(self.dispatchers, group))]
        bare = min((way.seconds - way.launches for way in ways), default=inf)
        seconds = min((way.seconds for way in ways), default=inf)
        peak_bytes = self.search.fitting.least_of_states(group[0], self.pins)
        return GroupBounds(group, seconds * rounds, bare * rounds, peak_bytes)

    def rows(self, group: Group, most_bytes: float = inf) -> Iterator[Row]:
        """Yield the rows of a group that may fit."""
        space, lists = self.search.space, self.search.space.recomputes(self.pins)
        pipelines = [pipeline for sizes in group for pipeline in space.pipelines(sizes, self.pins)]
        if not pipelines:
            return
        search, pins = self.search, self.pins
        peaks, alone = search.remembered(
            ("bytes", sizes_of(group[0]), _BYTES(pins)),  # for any dispatcher and graphs
            lambda: search.fitting.least_bytes(pipelines, lists, pins),
        )
        for pipeline, *rows in zip(pipelines, peaks.tolist(), alone.tolist(), strict=True):
            for modules, *sizes in zip(lists, *rows, strict=True):
                if sizes[0] <= most_bytes:
                    yield Row(pipeline.changed(recompute=modules), *sizes)

    def nodes(
        self,
        order: Callable[[float, float], tuple[float, float]],
        parts: Callable[[FoldedLayout], Iterable[Node]],
        *,
        most_bytes: float,
    ) -> list[Node]:
        """Return a heap of groups that may fit; rows open into `parts`, and `order` bounds them."""

        def rows(group: Group) -> Iterator[Node]:
            for row in self.rows(group, most_bytes):
                layout, peak, _ = row
                if ranked := self.dispatchers(layout):
                    seconds = ranked[0].seconds * self.search.prices.rounds_at_least(layout)
                    seconds += self.optimizer_at_least(row, most_bytes)
                    yield self.node(order(seconds, peak), layout, partial(parts, layout))

        nodes, plain, graphs = list[Node](), self._plain, self.pins.cuda_graphs
        for sizes, seconds, bare_seconds, peak in plain.bounds:
            is_plain = plain is self
            group = sizes if is_plain else [layout.changed(cuda_graphs=graphs) for layout in sizes]
            bounds = order(seconds if is_plain else bare_seconds, peak)
            if peak <= most_bytes:
                nodes.append(self.node(bounds, group[0], partial(rows, group)))
        heapq.heapify(nodes)
        return nodes

    @property
    def _plain(self) -> "LayoutTable":
        """The table whose bounds hold: without CUDA graphs, if graphs only save launches.

        No runtime runs sizes with graphs that it does not run without them. Full graphs also add
        biases.
        """
        graphs, kinds = self.pins.cuda_graphs, self.search.job.decoder.routed_kinds
        adds_biases = graphs == "full" and any(part and part.biases for part in kinds)
        if graphs in (None, "none") or adds_biases:
            return self
        return self.of(self.search, replace(self.pins, cuda_graphs=None))

    def node(
        self,
        bounds: tuple[float, float],
        layout: FoldedLayout,
        parts: Callable[[], Iterable[Node]] | None = None,
    ) -> Node:
        """Return a node with the next number."""
        return Node(bounds, next(self.search.numbers), layout, parts)

    @once_for("tp", "cp", "ep", "etp", "micro_batch", "overlap", "recompute")
    def dispatchers(self, layout: FoldedLayout) -> Sequence[PricedDispatcher]:
        """Return the dispatchers that suit a layout and its overlap, the fastest first."""
        price = self.search.prices.micro_batch
        able = self._able(layout) if self.search.space.obeys(RECOMPUTED, layout) else ()
        priced = [(*price(layout.changed(dispatcher=name)), name) for name in able]
        return sorted(itertools.starmap(PricedDispatcher, priced), key=lambda way: way.seconds)

    def cuts(self, layout: FoldedLayout) -> Sequence[FoldedLayout]:
        """Return an allowed row with its fastest dispatcher, in equal and in balanced stages."""
        ranked = self.dispatchers(layout)
        able = layout.changed(dispatcher=ranked[0].dispatcher) if ranked else layout
        if not ranked or not self.search.space.is_allowed(able):
            return ()
        if able.pp == 1 or self.pins.stages is not None:
            return (able,)
        balanced = self.search.prices.balanced_stages(able)
        return (able,) if balanced is None else (able, able.changed(stages=balanced))

    def zero_stages(self, cut: FoldedLayout) -> Iterator[FoldedLayout]:
        """Yield a cut with each allowed ZeRO stage, the lowest first."""
        space = self.search.space
        for zero in space.zeros(self.pins, cut.pp, cut.tp):
            layout = cut if zero == cut.zero else cut.changed(zero=zero)
            if layout is cut or space.is_allowed(layout):
                yield layout

    def smallest(self) -> FoldedLayout:
        """Return the layout of least memory, offloaded as pinned; raise if none obeys the pins."""
        search, prices = self.search, self.search.prices
        least, smallest = (inf, inf), None
        rows = (row for group in self.groups for row in self.rows(group))
        for layout, _, alone in sorted(rows, key=lambda row: row.alone_bytes):
            if alone > least[0]:
                break
            for sharded in itertools.chain.from_iterable(map(self.zero_stages, self.cuts(layout))):
                passes = prices.micro_batch(sharded)[0] * prices.rounds_at_least(sharded)
                size = search.fitting.memory.needs(sharded)[0], passes
                if size < least and search.space.is_allowed(sharded):
                    least, smallest = size, sharded
        if smallest is None:
            raise contradiction(search.space, self.pins)
        return smallest

    def optimizer_at_least(self, row: Row, most_bytes: float) -> float:
        """Return the least seconds of a mean rank's optimizer, with what a row must offload."""
        layout, fitting = row.layout, self.search.fitting
        share = self.pins.offload_optimizer or 0.0
        is_over = not share and most_bytes < row.alone_bytes
        if is_over and fitting.with_most_offload(layout, self.pins) is layout:
            least = (row.alone_bytes - most_bytes) / (row.alone_bytes - row.peak_bytes)
            share = next(share for share in OPTIMIZER_SHARES if share >= least - _ROUNDING)
        return self._optimizer_of_mean(layout, share)

    @once_for("dp", "cp", "tp", "pp", "ep", "etp")
    def _optimizer_of_mean(self, layout: FoldedLayout, share: float) -> float:
        space, prices = self.search.space, self.search.prices
        mean = prices.trained.of_rank(layout, prices.stages.whole).over(layout.pp)
        sharded = layout.changed(zero=space.zeros(self.pins, layout.pp, layout.tp)[-1])
        return prices.optimizer_seconds(sharded, share, mean)

    @once_for("tp", "ep", "etp", "overlap")
    def _able(self, layout: FoldedLayout) -> list[TokenDispatcher]:
        return self.search.space.dispatchers(layout, self.pins)


def wholes_in_order(
    heap: list[Node], is_open: Callable[[Node], bool], is_worth: Callable[[Node], bool]
) -> Iterator[Node]:
    """Yield whole layouts by their bounds while the first node is open; skip nodes not worth it."""
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
