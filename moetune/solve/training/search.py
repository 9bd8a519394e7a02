"""Search of a decoder's layouts: the fastest that fit, by branch and bound.

What is looked at next is what may be fastest. Sizes of the ranks have the bound of the fastest
overlap and dispatcher; once that is the least, these take its place, each with its own bound, then
their pipelines with what they recompute, and then what of these fits into memory, with its stages,
its ZeRO stage and its shares in host memory. Only what is near the best is played. The answer is
that of playing all, and only the bounds are in memory.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from moetune.domain.cluster import HEADROOM
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, LayoutRequest, Recompute, TrainingJob
from moetune.solve.training.fitting import Fitting, Roomy
from moetune.solve.training.memory import MemoryModel
from moetune.solve.training.space import LayoutSpace
from moetune.solve.training.step import StepPrices
from moetune.solve.training.ties import Leaders, PricedLayout

_Kind = Literal["sizes", "pipeline", "offload", "fit", "layout"]


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

    @property
    def fitting(self) -> Fitting:
        """Those that fit into memory."""
        return Fitting(
            space=self.space, prices=self.prices, memory=self.memory,
            limit_bytes=self.limit_bytes, host_bytes=self.host_bytes,
        )  # fmt: skip

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
        leaders = Leaders(roomy_bytes=self.limit_bytes * (1 - HEADROOM))
        branches = _Branches(
            search=self, pins=pins, fitting=self.fitting, recomputes=self.space.recomputes(pins)
        )
        open_ends: list[_Branch] = [*branches.roots()]
        heapq.heapify(open_ends)
        while open_ends and open_ends[0].seconds <= leaders.limit:
            one = heapq.heappop(open_ends)
            if one.seconds > leaders.limit_of(one.layout):
                continue
            if one.kind == "layout":
                leaders.add(self.priced(one.layout))
                continue
            for branch in branches.of(one):
                heapq.heappush(open_ends, branch)
        if leaders.found:
            return list(map(self.told, leaders.ranked()))
        return [self.told(self.priced(branches.smallest()))]

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

    def fits(self, layout: FoldedLayout) -> bool:
        """Return whether a layout fits into the memory of the devices and of their host."""
        return self.fitting.fits(layout)

    def exchanged(self, layout: FoldedLayout, pins: LayoutRequest) -> list[FoldedLayout]:
        """Return a layout with each dispatcher that goes with it, the fastest first."""
        every = self.space.dispatchers(layout, pins)
        able = sorted(
            (replace(layout, dispatcher=one) for one in every), key=self.prices.micro_batch
        )
        return able if able and self.space.is_allowed(able[0]) else []


class _Branch(NamedTuple):
    """Layouts that have some things in common, with the least seconds of any of them.

    Args:
        kind: what is open. "sizes": all but the sizes of the ranks; "pipeline": recomputation,
            dispatcher and memory; "offload": shares in host memory; "fit": only its bound is not
            known yet; "layout": nothing.
        roomy: of kind "pipeline", what was found to leave memory free with less recomputation.
    """

    seconds: float
    number: int
    layout: FoldedLayout
    kind: _Kind
    roomy: tuple[Roomy, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Branches:
    """Branches of one search, and what was put aside because it is too large.

    Args:
        least_bytes, least_layout: what takes least memory of all that was held against it.
    """

    search: FoldedSearch
    pins: LayoutRequest
    fitting: Fitting
    recomputes: Sequence[tuple[Recompute, ...]]
    hopeless: list[FoldedLayout] = field(default_factory=list)
    least_bytes: float = float("inf")
    least_layout: FoldedLayout | None = None
    _number: Iterator[int] = field(default_factory=itertools.count)
    _least: dict[tuple[object, ...], float] = field(default_factory=dict)

    def roots(self) -> Iterator[_Branch]:
        """Yield the sizes of the ranks."""
        for sizes in self.search.space.sizes(self.pins):
            every = self.search.space.overlapped(sizes, self.pins)
            least = min(self._micro_batch(one, one.recompute) for one in every)
            yield self._branch(least * self.search.prices.rounds(sizes), sizes, "sizes")

    def of(self, one: _Branch) -> Iterator[_Branch]:
        """Yield the branches that take the place of one."""
        if one.kind == "sizes":
            return self._pipelines(one.layout)
        if one.kind == "pipeline":
            return self._recomputed(one.layout, one.roomy)
        if one.kind == "offload":
            return self._bounded(self.fitting.offloaded(one.layout, self.pins))
        return self._bounded([one.layout])

    def _pipelines(self, sizes: FoldedLayout) -> Iterator[_Branch]:
        if self.fitting.is_hopeless(sizes, self.pins):
            self.hopeless.append(sizes)
            return
        prices, space = self.search.prices, self.search.space
        for overlapped in self.search.space.overlapped(sizes, self.pins):
            least = self._micro_batch(overlapped, overlapped.recompute)
            for one in space.pipelines(overlapped, self.pins):
                yield self._branch(least * prices.rounds_at_least(one), one, "pipeline")

    def _recomputed(self, layout: FoldedLayout, roomy: tuple[Roomy, ...]) -> Iterator[_Branch]:
        """Yield what fits of a pipeline, and the pipeline with more recomputation."""
        able, known = self.search.exchanged(layout, self.pins), [*roomy]
        if able:
            for cut in self.fitting.cuts(able[0], self.pins):
                yield from self._fitting(cut, able, known)
        elif layout.recompute == self.recomputes[0]:
            return  # not allowed whatever is recomputed
        more = [one for one in self._more_than(layout) if not self._is_done(layout, one, known)]
        if more:
            rounds = self.search.prices.rounds_at_least(layout)
            bound = min(self._micro_batch(layout, one) for one in more) * rounds
            next_one = replace(layout, recompute=more[0])
            yield self._branch(bound, next_one, "pipeline", roomy=tuple(known))

    def _fitting(
        self, cut: FoldedLayout, able: Sequence[FoldedLayout], roomy: list[Roomy]
    ) -> Iterator[_Branch]:
        """Yield a cut as it fits with each dispatcher, and add to what is roomy."""
        prices = self.search.prices
        for one in self.fitting.sharded(cut, self.pins):
            if any(known.covers(one, one.recompute) for known in roomy):
                return
            peak, host = self.search.memory.needs(one)
            self.see(peak, one)
            fits = self.fitting.fits_into(peak, host)
            share = 0.0 if fits else self.fitting.least_share(one, self.pins)
            if share is None:
                continue
            for to in able:
                layout = replace(one, dispatcher=to.dispatcher)
                kind: _Kind = "fit" if fits else "offload"
                seconds = prices.floor(layout) + prices.host_seconds(layout, share)
                yield self._branch(seconds, layout, kind)
            if self.fitting.is_roomy(one, peak):
                roomy.append(Roomy(recompute=one.recompute, stages=one.stages, zero=one.zero))
                return

    def _bounded(self, layouts: Iterable[FoldedLayout]) -> Iterator[_Branch]:
        for one in layouts:
            yield self._branch(self.search.prices.least(one), one, "layout")

    def _micro_batch(self, layout: FoldedLayout, recompute: tuple[Recompute, ...]) -> float:
        """Return the seconds of a micro-batch in the whole model with the fastest dispatcher."""
        key = (
            layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.overlap,
            recompute,
        )  # fmt: skip
        found = self._least.get(key)
        if found is None:
            every = self.search.space.dispatchers(layout, self.pins)
            able = (replace(layout, dispatcher=one, recompute=recompute) for one in every)
            least = min(map(self.search.prices.micro_batch, able), default=float("inf"))
            found = self._least[key] = least
        return found

    def _is_done(
        self, layout: FoldedLayout, recompute: tuple[Recompute, ...], roomy: Sequence[Roomy]
    ) -> bool:
        """Return whether all stages of a layout are covered, whatever its ZeRO stage."""
        is_cut = layout.pp > 1 and self.pins.stages is None
        return not is_cut and any(one.covers(layout, recompute) for one in roomy)

    def _more_than(self, layout: FoldedLayout) -> Sequence[tuple[Recompute, ...]]:
        """Return the lists of modules that come behind a layout's own."""
        return self.recomputes[self.recomputes.index(layout.recompute) + 1 :]

    def see(self, peak_bytes: float, layout: FoldedLayout) -> None:
        """Keep a layout if it takes least memory so far."""
        if peak_bytes < self.least_bytes:
            self.least_bytes, self.least_layout = peak_bytes, layout

    def smallest(self) -> FoldedLayout:
        """Return the layout that takes least memory, of those that were put aside, too.

        Raises:
            InputError: no layout obeys the rules.
        """
        space, memory = self.search.space, self.search.memory
        for sizes in self.hopeless:
            highest = replace(sizes, zero=space.zeros(self.pins, sizes.pp)[-1])
            if memory.least(highest, on_host=sizes.offload_optimizer) >= self.least_bytes:
                continue
            for overlapped in self.search.space.overlapped(highest, self.pins):
                for one in space.pipelines(overlapped, self.pins):
                    for recompute in self.recomputes:
                        able = self.search.exchanged(replace(one, recompute=recompute), self.pins)
                        for cut in self.fitting.cuts(able[0], self.pins) if able else ():
                            self.see(memory.needs(cut)[0], cut)
        if self.least_layout is None:
            raise space.impossible(self.pins)
        return self.least_layout

    def _branch(
        self, seconds: float, layout: FoldedLayout, kind: _Kind, roomy: tuple[Roomy, ...] = ()
    ) -> _Branch:
        return _Branch(seconds, next(self._number), layout, kind, roomy)
