"""Pareto front of a job's layouts: for every memory of a device the fastest step that it allows.

What is looked at next is what may take least memory. Sizes of the ranks have the least bytes of any
layout among them; their pipelines with what they recompute, and then how these are cut and sharded,
the least seconds, too: those that do not beat the fastest step so far are left out. Each layout
that does is on the front. Steps that save little of the one before are omitted.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

from moetune.domain.pipeline import StageLetters
from moetune.domain.training import (
    FoldedLayout,
    LayoutRequest,
    Overlap,
    Recompute,
)
from moetune.solve.joint.dispatchers import PricedDispatcher, RankedDispatchers
from moetune.solve.joint.pins import contradiction
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import NOISE, PricedLayout

SLOW, LARGE, SAVING = 3.0, 1.25, 0.03
"""Multiples of a plan's step, and of its limit of memory, up to which pages show a front, and the
share of a step that its next one saves."""


def memory_front(search: FoldedSearch, pins: LayoutRequest) -> tuple[PricedLayout, ...]:
    """Return the layouts of which none is both as fast and as small as another one.

    In order of memory, whose only limit is the hosts'; what is in host memory takes none of the
    devices'.

    Raises:
        InputError: the pins break a rule, or no layout obeys the rules.
    """
    found = front_within(search, pins, slowest_seconds=float("inf"), most_bytes=float("inf"))
    if not found:
        raise contradiction(search.space, pins)
    return found


def front_within(
    search: FoldedSearch, pins: LayoutRequest, *, slowest_seconds: float, most_bytes: float,
    saving: float = NOISE,
) -> tuple[PricedLayout, ...]:  # fmt: skip
    """Return the part of the front that is as fast and as small as this; it may be empty.

    Args:
        saving: share of a step that the next layout saves at least.
    """
    front: dict[float, PricedLayout] = {}
    sweep = _Sweep(search=search, pins=pins, table=search.dispatchers(pins), most_bytes=most_bytes)
    worth, open_ends = slowest_seconds, [*sweep.roots()]
    heapq.heapify(open_ends)
    while open_ends and open_ends[0].peak_bytes <= most_bytes:
        one = heapq.heappop(open_ends)
        if one.seconds > worth:
            continue
        if one.branches is not None:
            for branch in one.branches(worth):
                if branch.seconds <= worth and branch.peak_bytes <= most_bytes:
                    heapq.heappush(open_ends, branch)
        elif search.prices.least(one.layout) <= worth and search.space.is_allowed(one.layout):
            priced = search.priced(one.layout)
            if priced.step.seconds <= worth:
                front[one.peak_bytes] = priced  # in place of a slower one of that memory
                worth = priced.step.seconds * (1 - saving)
    found = [*front.values()]
    if search.apart is not None:
        found = [*_falling(found, most_bytes, saving)]
    return tuple(map(search.told, found))


def _falling(
    found: Sequence[PricedLayout], most_bytes: float, saving: float
) -> Iterator[PricedLayout]:
    """Yield layouts in the order of their own memory, each so much faster than the one before.

    Args:
        found: in the order of the memory that the mean of their layers needs.
    """
    worth = float("inf")
    for one in sorted(found, key=_size):
        if one.step.seconds <= worth and one.memory.peak_bytes <= most_bytes:
            yield one
            worth = one.step.seconds * (1 - saving)


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


class _Branch(NamedTuple):
    """Layouts that have some things in common, with the least bytes and seconds of any of them.

    Args:
        layout: with what they have in common; it is whole where there are no `branches`.
        branches: what takes its place, of at most so many seconds.
    """

    peak_bytes: float
    seconds: float
    number: int
    layout: FoldedLayout
    branches: Callable[[float], Iterable["_Branch"]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """Branches of one front."""

    search: FoldedSearch
    pins: LayoutRequest
    table: RankedDispatchers
    most_bytes: float
    _number: Iterator[int] = field(default_factory=itertools.count)

    def roots(self) -> Iterator[_Branch]:
        """Yield the sizes of the ranks."""
        for sizes in self.search.sizes(self.pins):
            peak = self.search.fitting.least_of_states(sizes, self.pins, may_offload=True)
            yield self._branch(peak, 0.0, sizes, partial(self._pipelines, sizes))

    def _pipelines(self, sizes: FoldedLayout, most_seconds: float) -> Iterator[_Branch]:
        """Yield the pipelines of sizes, with each recomputation."""
        rounds = self.search.prices.rounds(sizes)
        overlapped = [
            one
            for one in self.search.space.overlapped(sizes, self.pins)
            if self.table.at_least(one) * rounds <= most_seconds
        ]
        groups = {group[0].overlap: group for group in _of_same_memory(overlapped)}

        @cache
        def ways(overlap: Overlap, modules: tuple[Recompute, ...]) -> Sequence[PricedDispatcher]:
            return self._ways(groups[overlap], modules)

        firsts = [group[0] for group in groups.values()]
        for one, bounds in self.search.pipelines(firsts, self.pins, may_offload=True):
            rounds = self.search.prices.rounds_at_least(one)
            for modules, peak in bounds.items():
                able = ways(one.overlap, modules) if peak <= self.most_bytes else ()
                if able and (least := able[0].seconds * rounds) <= most_seconds:
                    yield self._branch(peak, least, one, partial(self._cuts, one, modules, able))

    def _ways(
        self, overlapped: Sequence[FoldedLayout], recompute: tuple[Recompute, ...]
    ) -> Sequence[PricedDispatcher]:
        """Return how layouts with some overlaps may exchange tokens, the fastest first."""
        every = [self.table.ranked(one, recompute) for one in overlapped]
        if len(every) == 1:
            return every[0]
        return sorted(itertools.chain(*every), key=lambda one: one.seconds)

    def _cuts(
        self, layout: FoldedLayout, recompute: tuple[Recompute, ...],
        ways: Sequence[PricedDispatcher], most_seconds: float,
    ) -> Iterator[_Branch]:  # fmt: skip
        """Yield a pipeline with each cut, ZeRO stage and way of exchange."""
        search, by_stages = self.search, dict[StageLetters | None, list[FoldedLayout]]()
        for overlap in dict.fromkeys(one.overlap for one in ways):
            one = layout if overlap == layout.overlap else layout.changed(overlap=overlap)
            able = search.with_fastest(one, recompute, self.table)
            for cut in search.fitting.cuts(able, self.pins) if able else ():
                by_stages.setdefault(cut.stages, []).append(cut)
        for cuts in by_stages.values():
            cut = cuts[0]  # of the overlap that is fastest
            passes = search.prices.least_of_pipeline(cut)  # with the other ways it is longer
            if passes > most_seconds:
                continue
            overlaps = {one.overlap for one in cuts}
            left = [one for one in ways if one.overlap in overlaps]
            for one in search.fitting.sharded(cut, self.pins):
                least = passes + search.prices.update.least_of_gradients(one)
                if least <= most_seconds:
                    peak = search.fitting.least_offloaded(one, self.pins)
                    yield self._exchanged(peak, least, one, left)

    def _exchanged(
        self,
        peak_bytes: float,
        least_seconds: float,
        cut: FoldedLayout,
        ways: Sequence[PricedDispatcher],
    ) -> _Branch:
        """Return a cut with the fastest of some ways of exchange, behind which the others come."""
        first, *others = ways
        is_fastest = (first.overlap, first.dispatcher) == (cut.overlap, cut.dispatcher)
        one = cut
        if not is_fastest:
            one = cut.changed(overlap=first.overlap, dispatcher=first.dispatcher)

        def branches(most_seconds: float) -> Iterator[_Branch]:
            if others:
                yield self._exchanged(peak_bytes, least_seconds, cut, others)
            yield from self._offloaded(one, most_seconds)

        seconds = max(least_seconds, first.seconds * self.search.prices.rounds_at_least(cut))
        return self._branch(peak_bytes, seconds, one, branches)

    def _offloaded(self, layout: FoldedLayout, most_seconds: float) -> Iterator[_Branch]:
        """Yield a cut with all that may be in host memory, which tells its memory."""
        fitting, prices = self.search.fitting, self.search.prices
        passes = prices.least_of_passes(layout)
        if passes > most_seconds:
            return
        for share in fitting.shares(layout, self.pins):
            seconds = passes + prices.update.optimizer_seconds(layout, share)
            if seconds > most_seconds:
                continue
            for one in fitting.waiting(layout, share, self.pins):
                peak, host = self.search.memory.needs(one)
                if fitting.fits_host(host):
                    yield self._branch(peak, seconds, one)

    def _branch(
        self,
        peak_bytes: float,
        seconds: float,
        layout: FoldedLayout,
        branches: Callable[[float], Iterable[_Branch]] | None = None,
    ) -> _Branch:
        return _Branch(peak_bytes, seconds, next(self._number), layout, branches)


def _of_same_memory(overlapped: Sequence[FoldedLayout]) -> list[list[FoldedLayout]]:
    """Return layouts that differ in their overlap, those together that have the same memory."""
    groups: dict[bool, list[FoldedLayout]] = {}
    for one in overlapped:
        groups.setdefault(one.overlap == "batch", []).append(one)
    return [*groups.values()]
