"""Search of a decoder's layouts: the fastest that fit, by branch and bound.

What is looked at next is what may be fastest. Sizes of the ranks have the bound of the fastest
overlap and dispatcher; once that is the least, these take its place, each with its own bound, then
their pipelines with what they recompute, and then what of these fits into memory, with its stages,
its ZeRO stage and its shares in host memory. Only what is near the best is played. The answer is
that of playing all, and only the bounds are in memory.

Where layers were recorded one by one, bounds are those of their mean, and what is played has each
layer's own fullest rank: the same sum of rows, so that bounds are off by what kernels' seconds
do not follow rows.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from moetune.domain.cluster import HEADROOM
from moetune.domain.training import FoldedLayout, LayoutRequest, Recompute
from moetune.solve.joint.dispatchers import PricedDispatcher, RankedDispatchers
from moetune.solve.joint.fitting import Fitting, Roomy
from moetune.solve.joint.search import FoldedSearch
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
        self._search, self._pins = search, pins
        self._leaders = Leaders(roomy_bytes=search.limit_bytes * (1 - HEADROOM))
        self._open_ends: list[_Branch] | None = None

    @classmethod
    def of(cls, search: FoldedSearch, pins: LayoutRequest) -> "BestLayouts":
        """Return those of pins, as far as they were searched for an earlier question."""
        found: BestLayouts = search.answers.setdefault(pins, cls(search, pins))
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
        if self._open_ends is None:
            self._open_ends = [*_Branches.of(self._search, self._pins).roots()]
            heapq.heapify(self._open_ends)
        open_ends, leaders = self._open_ends, self._leaders
        while open_ends and open_ends[0].seconds <= limit():
            one = heapq.heappop(open_ends)
            if one.seconds > leaders.limit_of(one.layout):
                continue
            if one.branches is not None:
                for branch in one.branches():
                    heapq.heappush(open_ends, branch)
            elif self._search.keeps(one.layout) and self._search.space.is_allowed(one.layout):
                leaders.add(self._search.priced(one.layout))

    def _told(self) -> list[PricedLayout]:
        if self._leaders.found:
            return list(map(self._search.told, self._leaders.ranked()))
        return [self._search.told(self._search.priced(self._search.smallest(self._pins)))]


class _Branch(NamedTuple):
    """Layouts that have some things in common, with the least seconds of any of them.

    Args:
        layout: with what they have in common; it is whole where there are no `branches`.
        branches: what takes its place.
    """

    seconds: float
    number: int
    layout: FoldedLayout
    branches: Callable[[], Iterable["_Branch"]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Branches:
    """Branches of one search.

    Args:
        recomputes: the lists of modules, from the least that is recomputed.
    """

    search: FoldedSearch
    pins: LayoutRequest
    fitting: Fitting
    table: RankedDispatchers
    recomputes: Sequence[tuple[Recompute, ...]]
    _number: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def of(cls, search: FoldedSearch, pins: LayoutRequest) -> "_Branches":
        """Return the branches of a search."""
        return cls(
            search=search, pins=pins, fitting=search.fitting, table=search.dispatchers(pins),
            recomputes=search.space.recomputes(pins),
        )  # fmt: skip

    def roots(self) -> Iterator[_Branch]:
        """Yield the sizes of the ranks."""
        for sizes in self.search.sizes(self.pins):
            overlapped = [*self.search.space.overlapped(sizes, self.pins)]
            seconds = min(map(self.table.at_least, overlapped)) * self.search.prices.rounds(sizes)
            yield self._branch(seconds, sizes, partial(self._overlapped, overlapped))

    def _overlapped(self, every_overlap: Sequence[FoldedLayout]) -> Iterator[_Branch]:
        """Yield sizes whose states may fit, by the seconds of their fastest overlap."""
        first = every_overlap[0]
        if not self.fitting.is_hopeless(first, self.pins):
            least = min(self.table.seconds(one, one.recompute) for one in every_overlap)
            seconds = least * self.search.prices.rounds(first)
            yield self._branch(seconds, first, partial(self._pipelines, every_overlap))

    def _pipelines(self, every_overlap: Sequence[FoldedLayout]) -> Iterator[_Branch]:
        """Yield the pipelines of sizes with the recomputation with which they may fit."""
        limit = self.fitting.limit_bytes
        for one in self.search.pipelines(every_overlap, self.pins, may_offload=True):
            fit = [modules for modules, least in one.least_bytes.items() if least <= limit]
            yield from self._recomputing(one.layout, fit)

    def _recomputing(
        self,
        layout: FoldedLayout,
        lists: Sequence[tuple[Recompute, ...]],
        roomy: Sequence[Roomy] = (),
    ) -> Iterator[_Branch]:
        """Yield a pipeline that recomputes some of the lists, if there are any."""
        if not lists:
            return
        least = self.table.least_seconds(layout, lists)
        seconds = least * self.search.prices.rounds_at_least(layout)
        yield self._branch(seconds, layout, partial(self._recomputed, layout, lists, roomy))

    def _recomputed(
        self,
        layout: FoldedLayout,
        lists: Sequence[tuple[Recompute, ...]],
        roomy: Sequence[Roomy],
    ) -> Iterator[_Branch]:
        """Yield what fits of a pipeline with the first list, and the pipeline with the others.

        Args:
            roomy: what was found to leave memory free with less recomputation.
        """
        able, known = self.search.with_fastest(layout, lists[0], self.table), [*roomy]
        if able:
            for cut in self.fitting.cuts(able, self.pins):
                yield from self._fitting(cut, known)
        elif lists[0] == self.recomputes[0]:
            return  # not allowed whatever is recomputed
        left = [one for one in lists[1:] if not self._is_done(layout, one, known)]
        yield from self._recomputing(layout, left, known)

    def _fitting(self, cut: FoldedLayout, roomy: list[Roomy]) -> Iterator[_Branch]:
        """Yield a cut as it fits with each dispatcher, and add to what is roomy."""
        for one in self.fitting.sharded(cut, self.pins):
            if any(known.covers(one, one.recompute) for known in roomy):
                return
            peak, host = self.search.memory.needs(one)
            fits = self.fitting.fits_into(peak, host)
            share = 0.0 if fits else self.fitting.least_share(one, self.pins)
            if share is None:
                continue
            added = self.search.prices.update.host_seconds(one, share)
            yield from self._dispatched(
                one, self.table.ranked(one, one.recompute), added_seconds=added, fits=fits
            )
            if self.fitting.is_roomy(one, peak):
                roomy.append(Roomy(recompute=one.recompute, stages=one.stages, zero=one.zero))
                return

    def _dispatched(
        self,
        layout: FoldedLayout,
        able: Sequence[PricedDispatcher],
        *,
        added_seconds: float,
        fits: bool,
    ) -> Iterator[_Branch]:
        """Yield what fits with the fastest of some dispatchers, behind which the others come.

        Args:
            added_seconds: to the bound, of what is in host memory.
            fits: whether nothing has to be in host memory.
        """
        if not able:
            return
        seconds = able[0].seconds * self.search.prices.rounds_at_least(layout) + added_seconds
        one = layout.changed(dispatcher=able[0].dispatcher)

        def branches() -> Iterator[_Branch]:
            every = [one] if fits else self.fitting.offloaded(one, self.pins)
            for whole in every:
                yield self._branch(self.search.prices.least(whole), whole)
            yield from self._dispatched(layout, able[1:], added_seconds=added_seconds, fits=fits)

        yield self._branch(seconds, one, branches)

    def _is_done(
        self, layout: FoldedLayout, recompute: tuple[Recompute, ...], roomy: Sequence[Roomy]
    ) -> bool:
        """Return whether all stages of a layout are covered, whatever its ZeRO stage."""
        is_cut = layout.pp > 1 and self.pins.stages is None
        return not is_cut and any(one.covers(layout, recompute) for one in roomy)

    def _branch(
        self,
        seconds: float,
        layout: FoldedLayout,
        branches: Callable[[], Iterable[_Branch]] | None = None,
    ) -> _Branch:
        return _Branch(seconds, next(self._number), layout, branches)
