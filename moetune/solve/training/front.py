"""Pareto front of a job's layouts: for every memory of a device the fastest step that it allows.

What is looked at next is what may take least memory. Sizes of the ranks, then their pipelines with
what they recompute, then how these are cut and sharded have the least bytes and seconds of any
layout among them; those whose seconds do not beat the fastest step so far are left out. Each layout
that does is on the front. Steps that save less than `NOISE` of the one before are omitted.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from moetune.domain.training import FoldedLayout, LayoutRequest, Recompute
from moetune.solve.training.dispatchers import RankedDispatchers
from moetune.solve.training.pins import contradiction
from moetune.solve.training.search import FoldedSearch
from moetune.solve.training.ties import NOISE, PricedLayout

SLOW, LARGE = 4.0, 1.5
"""Multiples of a plan's step, and of its limit of memory, up to which pages show a front."""


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
    search: FoldedSearch, pins: LayoutRequest, *, slowest_seconds: float, most_bytes: float
) -> tuple[PricedLayout, ...]:
    """Return the part of the front that is as fast and as small as this; it may be empty."""
    front: dict[float, PricedLayout] = {}
    sweep = _Sweep(search=search, pins=pins, table=search.dispatchers(pins))
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
        elif search.prices.least(one.layout) <= worth:
            priced = search.priced(one.layout)
            if priced.step.seconds <= worth:
                front[one.peak_bytes] = priced  # in place of a slower one of that memory
                worth = priced.step.seconds * (1 - NOISE)
    return tuple(map(search.told, front.values()))


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
    _number: Iterator[int] = field(default_factory=itertools.count)

    def roots(self) -> Iterator[_Branch]:
        """Yield the sizes of the ranks."""
        search, recomputes = self.search, self.search.space.recomputes(self.pins)
        for sizes in search.space.sizes(self.pins):
            overlapped = [*search.space.overlapped(sizes, self.pins)]
            least = min(
                self.table.seconds(one, recompute) for one in overlapped for recompute in recomputes
            )
            peak = search.fitting.least_of_states(sizes, self.pins, may_offload=True)
            yield self._branch(
                peak, least * search.prices.rounds(sizes), sizes,
                partial(self._pipelines, overlapped, recomputes),
            )  # fmt: skip

    def _pipelines(
        self, every_overlap: Sequence[FoldedLayout], recomputes: Sequence[tuple[Recompute, ...]],
        most_seconds: float,
    ) -> Iterator[_Branch]:  # fmt: skip
        """Yield the pipelines of sizes, with each recomputation."""
        fitting, prices = self.search.fitting, self.search.prices
        for overlapped in every_overlap:
            every = [*self.search.space.pipelines(overlapped, self.pins)]
            bounds = fitting.least_bytes(every, recomputes, self.pins, may_offload=True)
            seconds = [self.table.seconds(overlapped, one) for one in recomputes]
            for one, row in zip(every, bounds.tolist(), strict=True):
                rounds = prices.rounds_at_least(one)
                for recompute, least, each in zip(recomputes, row, seconds, strict=True):
                    if each * rounds <= most_seconds:
                        yield self._branch(
                            least, each * rounds, one, partial(self._cuts, one, recompute)
                        )

    def _cuts(
        self, layout: FoldedLayout, recompute: tuple[Recompute, ...], most_seconds: float
    ) -> Iterator[_Branch]:
        """Yield a pipeline with each cut, ZeRO stage and dispatcher."""
        search = self.search
        for cut in search.cuts(layout, recompute, self.pins, self.table):
            rounds = search.prices.rounds_at_least(cut)
            for to in self.table.ranked(cut, recompute):
                seconds = to.seconds * rounds
                if seconds > most_seconds:
                    break
                one = replace(cut, dispatcher=to.dispatcher)
                least = search.fitting.least_offloaded(one, self.pins)
                yield self._branch(least, seconds, one, partial(self._offloaded, one, seconds))

    def _offloaded(
        self, layout: FoldedLayout, seconds: float, most_seconds: float
    ) -> Iterator[_Branch]:
        """Yield a cut with all that may be in host memory, which tells its memory."""
        search = self.search
        for share in search.fitting.shares(layout, self.pins):
            added = seconds + search.prices.host_seconds(layout, share)
            if added > most_seconds:
                return  # larger shares take longer
            for one in search.fitting.waiting(layout, share, self.pins):
                peak, host = search.memory.needs(one)
                if search.fitting.fits_host(host):
                    yield self._branch(peak, added, one)

    def _branch(
        self,
        peak_bytes: float,
        seconds: float,
        layout: FoldedLayout,
        branches: Callable[[float], Iterable[_Branch]] | None = None,
    ) -> _Branch:
        return _Branch(peak_bytes, seconds, next(self._number), layout, branches)
