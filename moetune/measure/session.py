"""Run a measuring session: all ranks visit points together, with a sample for each visit.

`moetune profile` calls `run_session` on every rank; the samples go to the caller on rank 0. The
order of the visits is that of `schedule`, and the clock ends them.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count

from moetune.comm.agree import first_text, largest
from moetune.domain.cluster import DeviceKind
from moetune.domain.errors import InputError
from moetune.domain.samples import UNSTABLE, CollectivePoint, Point, Sample, StepPoint
from moetune.domain.units import format_seconds
from moetune.measure.device import THROTTLED, Clock, Device
from moetune.measure.estimate import Rates, probe, representatives, visit_seconds
from moetune.measure.grid import Preset
from moetune.measure.operations import Bench, prepare_experiment
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.schedule import (
    CERTAIN,
    MAX_VISITS,
    NUM_VISITS,
    relative_uncertainty,
    round_of,
    tiers,
)
from moetune.measure.timing import Effort, FailedPointError, Timing, explain, measure

_QUICK = Effort(min_blocks=5, max_blocks=20, max_seconds=0.08, warmup_seconds=0.05)
_FULL = Effort(min_blocks=10, max_blocks=100, max_seconds=0.6, warmup_seconds=0.6)
_EFFORTS: dict[tuple[Preset, DeviceKind], Effort] = {
    ("quick", "cpu"): _QUICK, ("quick", "cuda"): _QUICK, ("full", "cpu"): _FULL,
    # A GPU's clock varies by more than blocks may differ: warm-ups always lasted to their limit.
    ("full", "cuda"): replace(_FULL, warmup_seconds=0.05),
}  # fmt: skip
_LARGEST_SHARE, _SHORT_SECONDS = 1 / 6, 1.0
_PROBE = Effort(min_blocks=3, max_blocks=3, max_seconds=0.1, warmup_seconds=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The task of a session; all ranks get rank 0's task.

    Args:
        needed: points of the layers and models that will be planned.
        optional: further sizes and kinds.
        budget_seconds: the session ends after this; None visits every point until it is certain.
        ranks_per_node: None if all ranks are on one node.
        seed: seed of the order of visits.
    """

    needed: tuple[Point, ...]
    preset: Preset
    optional: tuple[Point, ...] = ()
    ranks_per_node: int | None = None
    budget_seconds: float | None = None
    seed: int = 0

    @property
    def points(self) -> tuple[Point, ...]:
        """All points, each only once."""
        return tuple(dict.fromkeys((*self.needed, *self.optional)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The points that will be measured, and the estimated time of a visit of each.

    Args:
        total_seconds: estimated time of all visits.
        usable_bytes: device memory that tensors can have; None on a CPU.
    """

    seconds: Mapping[Point, float]
    total_seconds: float
    usable_bytes: int | None = None


News = Estimates | Sample
"""The progress of a session: first the estimates, then each finished sample."""


def run_session(
    assignment: Assignment,
    *,
    device: Device,
    ranks: MeasuringRanks,
    on_news: Callable[[News], object],
) -> None:
    """Probe the machine, and visit the points in rounds; all ranks call this together.

    A point that fails becomes a sample with an error, and is not visited again. Other points are
    visited until their undisturbed visits agree, or the budget is spent.

    Args:
        on_news: called on rank 0 with the estimates, and with each sample when it is finished.

    Raises:
        InputError: the budget is too short for any point; raised on every rank.
    """
    start = time.perf_counter()
    control = ranks.control
    assignment = control.broadcast_object(assignment, "the points to measure")
    if not assignment.points:
        return
    _open_groups(assignment, ranks)
    chosen = representatives(device, control.num_ranks)
    bench = Bench(device=device, ranks=ranks, representatives=chosen)
    effort = _EFFORTS[assignment.preset, device.kind]
    visits = _Visits(bench, effort, on_news, start)
    rates = control.broadcast_object(visits.probe(assignment.points), "rough speeds")
    seconds = {point: visit_seconds(point, rates, effort) for point in assignment.points}
    by_worth = _affordable(assignment, seconds)
    # This comes after the probe, because kernels and workspaces take memory, too.
    usable_bytes = ranks.usable_bytes(device)
    estimates = replace(_estimates(assignment, by_worth, seconds), usable_bytes=usable_bytes)
    if control.rank == 0:
        on_news(estimates)
    visits.visit_all(by_worth, assignment, seconds)


def _open_groups(assignment: Assignment, ranks: MeasuringRanks) -> None:
    """Open the groups that points need, and the group of all ranks."""
    num_ranks = ranks.control.num_ranks
    linked = (CollectivePoint, StepPoint)
    groups = {point.group for point in assignment.points if isinstance(point, linked)}
    ranks.open_groups(
        [*groups, (num_ranks, 0)], ranks_per_node=assignment.ranks_per_node or num_ranks
    )


def _affordable(
    assignment: Assignment, seconds: Mapping[Point, float]
) -> tuple[tuple[Point, ...], ...]:
    """Return the points in tiers, without points whose visit takes over a sixth of the budget.

    The largest remaining sizes are then the ends of their curves, and come first.
    """
    budget_seconds = assignment.budget_seconds
    most = math.inf
    if budget_seconds is not None:
        most = max(_LARGEST_SHARE * budget_seconds, _SHORT_SECONDS)
    needed, optional = (
        [point for point in points if seconds[point] <= most]
        for points in (assignment.needed, assignment.optional)
    )
    return tiers(needed, optional)


def _estimates(
    assignment: Assignment, by_worth: Sequence[Sequence[Point]], seconds: Mapping[Point, float]
) -> Estimates:
    """Return the points for which the budget is long enough; all points without a budget."""
    total = NUM_VISITS * sum(seconds.values())
    budget_seconds = assignment.budget_seconds
    if budget_seconds is None:
        return Estimates(seconds=seconds, total_seconds=total)
    order = list(chain.from_iterable(by_worth)) or sorted(seconds, key=lambda point: seconds[point])
    spent = list(accumulate(seconds[point] for point in order))
    within = bisect_right(spent, budget_seconds)
    chosen = {point: seconds[point] for point in order[:within]}
    if order and not chosen:
        raise InputError(
            f"--budget {format_seconds(budget_seconds)} is too short for any point",
            f"the first takes about {format_seconds(spent[0])}; a profile of one layer needs "
            "half a minute",
        )
    return Estimates(seconds=chosen, total_seconds=min(budget_seconds, total))


class _Visits:
    """The session's samples so far, one per visit, measured together with the other ranks.

    Args:
        start: start of the session on `perf_counter`.
    """

    def __init__(
        self, bench: Bench, effort: Effort, on_news: Callable[[News], object], start: float
    ) -> None:
        self._bench, self._effort, self._on_news, self._start = bench, effort, on_news, start
        self._control, self._clock = bench.ranks.control, Clock(bench.device)
        self._samples: dict[Point, list[Sample]] = {}

    def probe(self, points: Sequence[Point]) -> Rates:
        """Return rough speeds of the machine."""
        return probe(points, self._bench, lambda point: self._timed(point, _PROBE))

    def visit_all(
        self,
        by_worth: Sequence[Sequence[Point]],
        assignment: Assignment,
        seconds: Mapping[Point, float],
    ) -> None:
        """Visit in rounds until every point is certain, or the budget is spent.

        Args:
            seconds: estimated times of a visit; a visit is omitted if less time is left.
        """
        budget = math.inf if assignment.budget_seconds is None else assignment.budget_seconds

        def visit_each(points: Sequence[Point]) -> bool:
            """Visit the points, and return whether there was time for any of them."""
            is_any = False
            for point in [point for point in points if not self._is_settled(point)]:
                if seconds[point] <= budget - self._elapsed_seconds():
                    self._visit(point)
                    is_any = True
            return is_any

        for number in count():
            new, again = round_of(by_worth, number, assignment.seed)
            visit_each(new)
            if not visit_each(again) and number >= len(by_worth):
                return

    def _is_settled(self, point: Point) -> bool:
        """Return whether another visit would give nothing new."""
        visits = self._samples.get(point, [])
        if any(visit.error for visit in visits) or len(visits) >= MAX_VISITS:
            return True
        return len(visits) >= NUM_VISITS and relative_uncertainty(visits) <= CERTAIN

    def _elapsed_seconds(self) -> float:
        """Return the time since the start, which is equal on all ranks."""
        (elapsed,) = largest(self._control, (time.perf_counter() - self._start,), "elapsed time")
        return elapsed

    def _visit(self, point: Point) -> None:
        """Measure the point, and report the sample on rank 0."""
        sample = self._sample(point)
        self._samples.setdefault(point, []).append(sample)
        if self._control.rank == 0:
            self._on_news(sample)

    def _sample(self, point: Point) -> Sample:
        """Return the point's times, or its error."""
        try:
            timing = self._timed(point, self._effort)
        except FailedPointError as error:
            return Sample(point=point, seconds=(), error=error.what)
        (is_low,) = largest(self._control, (self._clock.is_low(),), "low clocks")
        seen = {UNSTABLE: timing.is_unstable, THROTTLED: is_low > 0}
        return Sample(
            point=point,
            seconds=timing.seconds,
            num_iterations=timing.num_iterations,
            marks=tuple(mark for mark, is_seen in seen.items() if is_seen),
        )

    def _timed(self, point: Point, effort: Effort) -> Timing:
        """Prepare the point on every rank, and measure it if all ranks could prepare it."""
        bench, experiment, text = self._bench, None, ""
        try:
            experiment = prepare_experiment(point, bench)
        except (RuntimeError, MemoryError, InputError) as error:
            text = explain(error)
        reason = first_text(self._control, text, "the preparation of a point")
        if experiment is None or reason:
            raise FailedPointError(reason)
        return measure(experiment, device=bench.device, ranks=bench.ranks, effort=effort)
