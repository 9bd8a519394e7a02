"""Search of a decoder's layouts: the fastest that fit, by branch and bound.

What is looked at next is what may be fastest. Sizes have a bound that no stages of theirs beat;
once that is the least, their variants that fit take its place, each with the bound of its
pipeline; and only those are played whose bound is near the best. The answer is that of playing
all, and only the bounds are in memory.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moetune.domain.cluster import HEADROOM
from moetune.domain.pipeline import SCHEDULES
from moetune.domain.targets import Target
from moetune.domain.training import (
    TOKEN_DISPATCHERS,
    FoldedLayout,
    LayoutRequest,
    TokenDispatcher,
    TrainingJob,
)
from moetune.solve.training.memory import FRAGMENTATION, MemoryModel, RankMemory
from moetune.solve.training.offload import OPTIMIZER_SHARES, least_offloaded
from moetune.solve.training.space import LayoutSpace
from moetune.solve.training.step import StepPrices, StepSeconds

NUM_ALTERNATIVES = 5
NOISE = 0.01
"""Steps within it of each other tie: one that leaves memory free is taken, then the simpler one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """A layout with its step and its fullest pipeline rank.

    Args:
        saved_seconds: of the step, by hidden exchanges; only of a search's answers.
    """

    layout: FoldedLayout
    step: StepSeconds
    memory: RankMemory
    saved_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedSearch:
    """The layouts of a job.

    Args:
        limit_bytes: usable memory of a device.
        target: the runtime, which bounds the layouts.
        host_bytes: memory of a node's host.
    """

    job: TrainingJob
    prices: StepPrices
    memory: MemoryModel
    limit_bytes: float
    target: Target
    host_bytes: float = float("inf")

    @property
    def space(self) -> LayoutSpace:
        """The layouts that the rules and the target allow."""
        return LayoutSpace(job=self.job, target=self.target)

    def priced(self, layout: FoldedLayout) -> PricedLayout:
        """Return a layout with its price and memory, whether it fits or not."""
        return PricedLayout(
            layout=layout,
            step=self.prices.step(layout),
            memory=self.memory.peak(layout),
        )

    def best(self, pins: LayoutRequest) -> list[PricedLayout]:
        """Return the fastest layouts that fit, best first; where none does, the smallest.

        Raises:
            InputError: the pins break a rule, or no layout obeys the rules.
        """
        leaders, smallest = _Leaders(roomy_bytes=self.limit_bytes * (1 - HEADROOM)), _Smallest()
        hopeless: list[FoldedLayout] = []
        number = itertools.count()
        open_ends = [
            _Bound(self.prices.floor(one), next(number), one) for one in self.unsized(pins)
        ]
        heapq.heapify(open_ends)
        while open_ends and open_ends[0].seconds <= leaders.limit:
            least, _, layout, fits = heapq.heappop(open_ends)
            if least > leaders.limit_of(layout):
                continue
            if fits:
                leaders.add(self.priced(layout))
                continue
            if self._is_hopeless(layout, pins):
                hopeless.append(layout)
                continue
            fitting = self._fitting(layout, pins, smallest)
            for seconds, one in fitting:
                heapq.heappush(open_ends, _Bound(seconds, next(number), one, fits=True))
            is_done = any(self._is_roomy(one) for _, one in fitting)
            more = [] if is_done else self._more_recomputed(layout, pins)
            if more:
                bound = min(map(self.prices.floor, more))
                heapq.heappush(open_ends, _Bound(bound, next(number), more[0]))
        if leaders.found:
            return list(map(self.told, leaders.ranked()))
        return [self.told(self._smallest(hopeless, pins, smallest))]

    def _smallest(
        self, hopeless: Sequence[FoldedLayout], pins: LayoutRequest, smallest: "_Smallest"
    ) -> PricedLayout:
        """Return the smallest layout of those seen, and of those that were hopeless."""
        for layout in hopeless:
            for one in (layout, *self._more_recomputed(layout, pins)):
                self._fitting(one, pins, smallest)
        if smallest.layout is None:
            raise self.space.impossible(pins)
        return self.priced(smallest.layout)

    def told(self, one: PricedLayout) -> PricedLayout:
        """Return an answer with its degrees, and with what its overlap saves."""
        if one.layout.overlap == "none":
            return one
        plain = replace(one.layout, overlap="none", degree=None)
        return replace(
            one,
            layout=replace(one.layout, degree=self.prices.blocks.degree(one.layout)),
            saved_seconds=self.prices.step(plain).seconds - one.step.seconds,
        )

    def unsized(self, pins: LayoutRequest) -> Iterator[FoldedLayout]:
        """Yield sizes with each overlap and its fastest dispatcher, nothing recomputed.

        What is recomputed as well takes no less time. Which dispatcher is the fastest depends on
        the ranks that share a block, and not on the pipeline.
        """
        space = self.space
        first = space.recomputes(pins)[0]
        overlaps = [pins.overlap] if pins.overlap else self.target.overlaps
        fastest: dict[tuple[object, ...], TokenDispatcher] = {}
        for shape in space.shapes(pins):
            able = tuple(space.dispatchers(shape, pins))
            shared = shape.tp, shape.cp, shape.ep, shape.etp, shape.micro_batch, able
            for overlap in overlaps:
                plain = replace(shape, recompute=first, overlap=overlap)
                if (*shared, overlap) not in fastest:
                    variants = [replace(plain, dispatcher=one) for one in able]
                    found = min(variants, key=self.prices.floor)
                    fastest[*shared, overlap] = found.dispatcher
                yield replace(plain, dispatcher=fastest[*shared, overlap])

    def _fitting(
        self, layout: FoldedLayout, pins: LayoutRequest, smallest: "_Smallest"
    ) -> list[tuple[float, FoldedLayout]]:
        """Return the dispatchers and stages with which a layout fits, each with its bound."""
        space = self.space
        able = [replace(layout, dispatcher=one) for one in space.dispatchers(layout, pins)]
        able = [one for one in able if space.is_allowed(one)]
        cuts = self._cuts_that_fit(able[0], pins, smallest) if able else []
        every = [replace(one, stages=cut.stages) for cut in cuts for one in able]
        if able and not every:
            offloaded = self._offloaded(able[0], pins)
            every = [replace(one, dispatcher=to.dispatcher) for one in offloaded for to in able]
            every = [one for one in every if space.is_allowed(one)]
        return [(self.prices.least(one), one) for one in every]

    def _is_hopeless(self, layout: FoldedLayout, pins: LayoutRequest) -> bool:
        """Return whether the states alone are too large, whatever is cut, recomputed or offloaded.

        Such sizes are looked at only where nothing fits, for the smallest layout of all.
        """
        most = pins.offload_optimizer
        if most is None:
            most = float(self.target.offloads_optimizer)
        return self.memory.least(layout, on_host=most) > self.limit_bytes

    def fits(self, layout: FoldedLayout) -> bool:
        """Return whether a layout fits into the memory of the devices and of their host."""
        peak, host = self.memory.needs(layout)
        ranks = min(self.job.world_size, self.prices.device.per_node)
        return host * ranks <= self.host_bytes and peak <= self.limit_bytes

    def _offloaded(self, layout: FoldedLayout, pins: LayoutRequest) -> list[FoldedLayout]:
        """Return a layout with as little in host memory as makes it fit, of each kind that can."""
        memory, layers = self.memory.peak(layout), self.job.decoder.num_layers
        needed = memory.peak_bytes - self.limit_bytes
        kinds: list[list[FoldedLayout]] = []
        if pins.offload_activations is None and layout.pp == 1 and not layout.recompute:
            freed = needed / (1 + FRAGMENTATION)
            blocks = least_offloaded(layers, freed, sum(memory.activations.values()))
            kinds.append([replace(layout, offload_activations=blocks / layers)])
        freed = memory.parts["optimizer"] + memory.parts["optimizer step"]
        if pins.offload_optimizer is None and self.target.offloads_optimizer:
            enough = [one for one in OPTIMIZER_SHARES if one * freed >= needed]
            kinds.append([replace(layout, offload_optimizer=one) for one in enough])
        return [
            one for kind in kinds for one in itertools.islice(filter(self._is_candidate, kind), 1)
        ]

    def _is_roomy(self, layout: FoldedLayout) -> bool:
        """Return whether no recomputation could make a layout the better one of two that tie."""
        peak, _ = self.memory.needs(layout)
        return not _on_host(layout) and peak <= self.limit_bytes * (1 - HEADROOM)

    def _is_candidate(self, layout: FoldedLayout) -> bool:
        return self.space.is_allowed(layout) and self.fits(layout)

    def _cuts_that_fit(
        self, layout: FoldedLayout, pins: LayoutRequest, smallest: "_Smallest"
    ) -> list[FoldedLayout]:
        """Return the layout with equal stages, and with balanced ones where these are faster."""
        cuts = [layout]
        if layout.pp > 1 and pins.stages is None:
            cuts = list(dict.fromkeys((layout, self.prices.balanced(layout))))
        fitting = []
        for cut in cuts:
            peak, _ = self.memory.needs(cut)
            smallest.see(peak, cut)
            if self.fits(cut):
                fitting.append(cut)
        if len(fitting) > 1:
            equal, balanced = map(self.prices.least, fitting)
            return fitting if balanced * (1 + NOISE) < equal else fitting[:1]
        return fitting

    def _more_recomputed(self, layout: FoldedLayout, pins: LayoutRequest) -> list[FoldedLayout]:
        """Return the layout with each list of modules that recomputes more."""
        wanted = self.space.recomputes(pins)
        more = wanted[wanted.index(layout.recompute) + 1 :]
        return [replace(layout, recompute=one) for one in more]


class _Bound(NamedTuple):
    """The least seconds of a layout, and unless it fits, of all that recompute more."""

    seconds: float
    number: int
    layout: FoldedLayout
    fits: bool = False


@dataclass(slots=True)
class _Smallest:
    """The layout seen that takes least memory."""

    peak_bytes: float = float("inf")
    layout: FoldedLayout | None = None

    def see(self, peak_bytes: float, layout: FoldedLayout) -> None:
        if peak_bytes < self.peak_bytes:
            self.peak_bytes, self.layout = peak_bytes, layout


@dataclass(slots=True)
class _Leaders:
    """The fastest layouts of each of the sizes that lead, with those that tie with them.

    Args:
        roomy_bytes: that a layout takes at most where it wins a tie.
        limit: seconds above which no layout changes the answer.
    """

    roomy_bytes: float
    found: dict[tuple[int, ...], list[PricedLayout]] = field(default_factory=dict)
    limit: float = float("inf")

    def limit_of(self, layout: FoldedLayout) -> float:
        """Return the seconds above which a layout does not tie with the best of its sizes."""
        tied = self.found.get(_ranks(layout))
        return float("inf") if tied is None else tied[0].step.seconds * (1 + NOISE)

    def add(self, one: PricedLayout) -> None:
        key = _ranks(one.layout)
        tied = _tied([*self.found.get(key, ()), one])
        self.found[key] = sorted(tied, key=_seconds)
        fastest = heapq.nsmallest(
            1 + NUM_ALTERNATIVES, (_seconds(tied[0]) for tied in self.found.values())
        )
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
            _on_host(one.layout) > 0, one.memory.peak_bytes > self.roomy_bytes, *_complexity(one)
        )  # fmt: skip


def _seconds(one: PricedLayout) -> float:
    return one.step.seconds


def _on_host(layout: FoldedLayout) -> float:
    """Return the shares that are in host memory."""
    return layout.offload_activations + layout.offload_optimizer


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
        _on_host(layout), len(layout.recompute), layout.overlap != "none",
        TOKEN_DISPATCHERS.index(layout.dispatcher), SCHEDULES.index(layout.order), layout.vpp,
        layout.stages is not None,
        sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.ep, layout.etp)),
        one.step.seconds,
    )  # fmt: skip
