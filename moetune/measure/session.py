"""Run a measuring session: all points in one shuffled order on all ranks, a sample for each.

`moetune profile` calls `run_session` on every rank; the samples go to the caller on rank 0.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from moetune.comm.agree import first_text, largest
from moetune.domain.errors import InputError
from moetune.domain.samples import CollectivePoint, GemmPoint, Point, Sample
from moetune.measure.device import Device
from moetune.measure.estimate import (
    Rates,
    levels,
    point_seconds,
    probe,
    representatives,
    within_budget,
)
from moetune.measure.grid import Preset
from moetune.measure.noise import (
    AGAIN_SHARE,
    BUSY,
    THROTTLED,
    Load,
    next_noisy,
    num_sharers,
    process_cores,
)
from moetune.measure.operations import Makers, Representatives, prepare_experiment
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.timing import Effort, FailedPointError, Timing, explain, measure

_PROBE = Effort(min_blocks=3, max_blocks=3, max_seconds=0.1, warmup_seconds=0.05)
_EFFORTS: dict[Preset, Effort] = {
    "quick": Effort(min_blocks=8, max_blocks=40, max_seconds=0.2, warmup_seconds=0.08),
    "full": Effort(min_blocks=20, max_blocks=200, max_seconds=2.0, warmup_seconds=2.0),
}
_UNSTABLE = "unstable"
_NO_MAKERS: Makers = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The task of a session; all ranks get rank 0's.

    Args:
        points: candidates, the most valuable first.
        budget_seconds: measure only the points that fit; None measures all.
        ranks_per_node: None if all ranks are on one node.
        plan_only: estimate the times, and measure nothing but the probe.
        seed: of the order.
    """

    points: tuple[Point, ...]
    preset: Preset
    ranks_per_node: int | None = None
    budget_seconds: float | None = None
    plan_only: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The points that will be measured, with estimated times.

    Args:
        again_seconds: time left to measure noisy points again.
    """

    seconds: Mapping[Point, float]
    again_seconds: float = 0.0


News = Estimates | Sample
"""Progress of a session: first the estimates, then each finished sample."""


def run_session(
    assignment: Assignment,
    *,
    device: Device,
    ranks: MeasuringRanks,
    on_news: Callable[[News], object],
    makers: Makers = _NO_MAKERS,
) -> None:
    """Probe, plan, and measure every point; all ranks call this together.

    A point that fails becomes a sample with an error. Noisy points are measured again, for half
    the time that all points took, or until the budget is spent. The first point is measured again
    at the end, to detect a machine that changed meanwhile (`mark_drift`). With a budget the most
    valuable points go first, and the session ends when it is spent, whatever was estimated.

    Args:
        on_news: called on rank 0 with the estimates, and with every sample as it is finished.
        makers: of operations that only the caller knows.

    Raises:
        InputError: the budget holds no point; on every rank.
        CollectiveError: a rank is gone.
    """
    start = time.perf_counter()
    control = ranks.control
    assignment = control.broadcast_object(assignment, "the points to measure")
    if not assignment.points:
        return
    groups = {point.group for point in assignment.points if isinstance(point, CollectivePoint)}
    ranks.open_groups(
        [*groups, (control.num_ranks, 0)],
        ranks_per_node=assignment.ranks_per_node or control.num_ranks,
        device=device.torch_device,
    )
    sharers = num_sharers(control.all_gather_object(process_cores(), "the cores of ranks"))
    effort = _EFFORTS[assignment.preset].for_sharers(max(sharers))
    runner = _PointRunner(
        device, ranks, representatives(device, control.num_ranks), sharers[control.rank], makers
    )
    rates = control.broadcast_object(runner.probe(assignment.points), "rough speeds")
    estimates = _estimates(assignment, rates, effort)
    if control.rank == 0:
        on_news(estimates)
    if assignment.plan_only:
        return
    order = _order(tuple(estimates.seconds), assignment)
    _visit_all(order, _Visits(runner, effort, ranks, on_news, start), assignment.budget_seconds)


def _estimates(assignment: Assignment, rates: Rates, effort: Effort) -> Estimates:
    """Return the points that fit into the budget, and the time left for noisy ones."""
    points, budget_seconds = assignment.points, assignment.budget_seconds
    seconds = {point: point_seconds(point, rates, effort) for point in points}
    if budget_seconds is None:
        return Estimates(seconds=seconds, again_seconds=AGAIN_SHARE * sum(seconds.values()))
    chosen = {point: seconds[point] for point in within_budget(points, seconds, budget_seconds)}
    return Estimates(seconds=chosen, again_seconds=max(budget_seconds - sum(chosen.values()), 0.0))


def _order(points: Sequence[Point], assignment: Assignment) -> tuple[Point, ...]:
    """Return the points shuffled; with a budget, which may run out, the most valuable first."""
    order = shuffled(points, assignment.seed)
    if assignment.budget_seconds is None:
        return order
    value = levels(points)
    return (order[0], *sorted(order[1:], key=lambda point: value[point]))


def _visit_all(order: Sequence[Point], visits: "_Visits", budget_seconds: float | None) -> None:
    """Visit every point, noisy ones again while there is time, and the first one at the end."""
    for point in order:
        if budget_seconds is not None and visits.elapsed_seconds() > budget_seconds:
            break  # on a busy machine points take longer than estimated
        visits.visit(point)
    limit_seconds = budget_seconds or (1 + AGAIN_SHARE) * visits.elapsed_seconds()
    while visits.elapsed_seconds() < limit_seconds and (noisy := next_noisy(visits.samples)):
        visits.visit(noisy)
    visits.visit(order[0])


class _Visits:
    """The samples of a session so far; each visit of a point adds one.

    Args:
        start: beginning of the session, on `perf_counter`.
    """

    def __init__(
        self,
        runner: "_PointRunner",
        effort: Effort,
        ranks: MeasuringRanks,
        on_news: Callable[[News], object],
        start: float,
    ) -> None:
        self._runner, self._effort, self._control = runner, effort, ranks.control
        self._on_news, self._start = on_news, start
        self.samples: dict[Point, list[Sample]] = {}

    def visit(self, point: Point) -> None:
        """Measure the point, and report the sample on rank 0."""
        sample = self._runner.sample(point, self._effort)
        self.samples.setdefault(point, []).append(sample)
        if self._control.rank == 0:
            self._on_news(sample)

    def elapsed_seconds(self) -> float:
        """Return the time since the start, the same on all ranks."""
        (elapsed,) = largest(self._control, (time.perf_counter() - self._start,), "elapsed time")
        return elapsed


def shuffled(points: Sequence[Point], seed: int) -> tuple[Point, ...]:
    """Return the points in an order that only the seed decides, a GEMM first.

    The first point is measured twice, and times of GEMMs repeat best.
    """
    generator = torch.Generator().manual_seed(seed)
    order = [points[place] for place in torch.randperm(len(points), generator=generator).tolist()]
    first = next((point for point in order if isinstance(point, GemmPoint)), order[0])
    return (first, *(point for point in order if point != first))


class _PointRunner:
    """Measures one point after another on this rank."""

    def __init__(
        self,
        device: Device,
        ranks: MeasuringRanks,
        representatives: Representatives,
        sharers: int,
        makers: Makers,
    ) -> None:
        self._device, self._ranks, self._representatives = device, ranks, representatives
        self._makers = makers
        self._load = Load(device, sharers=sharers)

    def probe(self, points: Sequence[Point]) -> Rates:
        """Return rough speeds."""
        return probe(points, self._representatives, lambda point: self._timed(point, _PROBE))

    def sample(self, point: Point, effort: Effort) -> Sample:
        """Return the point's times, or its error."""
        try:
            timing = self._timed(point, effort.for_point(point))
        except FailedPointError as error:
            return Sample(point=point, seconds=(), error=error.what)
        mine = [float(sign) for sign in self._load.signs()]
        signs = largest(self._ranks.control, mine, "signs of other load")
        seen = {_UNSTABLE: timing.is_unstable, BUSY: signs[0] > 0, THROTTLED: signs[1] > 0}
        return Sample(
            point=point,
            seconds=timing.seconds,
            num_iterations=timing.num_iterations,
            marks=tuple(mark for mark, is_seen in seen.items() if is_seen),
        )

    def _timed(self, point: Point, effort: Effort) -> Timing:
        """Prepare the point on every rank and, if all of them could, measure it."""
        experiment, text = None, ""
        try:
            experiment = prepare_experiment(
                point,
                device=self._device,
                ranks=self._ranks,
                representatives=self._representatives,
                makers=self._makers,
            )
        except (RuntimeError, MemoryError, InputError) as error:
            text = explain(error)
        reason = first_text(self._ranks.control, text, "the preparation of a point")
        if experiment is None or reason:
            raise FailedPointError(reason)
        return measure(experiment, device=self._device, ranks=self._ranks, effort=effort)
