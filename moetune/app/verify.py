"""`moetune verify`: a plan's predictions against real steps of its layer on this machine."""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moetune.config import Launch
from moetune.domain.constraints import Strategy
from moetune.domain.costs import Costs
from moetune.domain.document import UNLESS_DEFAULT, encode
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.kernels import KernelName
from moetune.domain.layer import Workload
from moetune.domain.plan import SAFE_DECISION, Decision, Plan
from moetune.domain.profile import Profile
from moetune.domain.records import prediction_error
from moetune.fit.costs import costs_of
from moetune.measure.sizes import expert_shares
from moetune.solve.trace import plan_step

if TYPE_CHECKING:
    from moetune.measure.steps import MeasuredSteps

VERIFICATION_SCHEMA = "moetune.verification/1"
DEGREES = (1, 2, 4, 8, 16)
NUM_ROUNDS = 7
LOST = 0.02
"""A plan has lost if its step is slower than in one chunk by more than this share."""
_TOLERANCES = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedStep:
    """A decision's predicted and measured step; measured times are medians over the rounds.

    Args:
        predicted_seconds: None without a profile to predict from, and for another kernel.
        deviation: largest relative difference of output and gradients from those in one chunk.
        kernel: kernel of the experts; "" for the layer's default.
    """

    forward_degree: int
    backward_degree: int
    strategy: Strategy
    is_planned: bool
    predicted_seconds: float | None
    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    raw_step_seconds: tuple[float, ...]
    deviation: float
    kernel: KernelName = field(default="", metadata=UNLESS_DEFAULT)

    @property
    def error(self) -> float | None:
        """The `prediction_error` of the step; None without a prediction."""
        if self.predicted_seconds is None:
            return None
        return prediction_error(self.predicted_seconds, self.step_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The comparison of all decisions with their predictions.

    Args:
        tolerance: largest deviation at which results in this dtype count as equal.
        imbalance: rows of the busiest rank over the mean.
        planned_imbalance: the imbalance that the plan assumes, by its routing and placement.
        kernel: the plan's kernel of the experts; "" for the layer's default.
        range_seconds: 5th and 95th percentile of the plan's step; None without a range.
    """

    plan_id: str
    steps: tuple[VerifiedStep, ...]
    tolerance: float
    imbalance: float
    range_seconds: tuple[float, float] | None = None
    planned_imbalance: float = field(default=1.0, metadata=UNLESS_DEFAULT)
    kernel: KernelName = field(default="", metadata=UNLESS_DEFAULT)

    @property
    def planned(self) -> VerifiedStep:
        """The step with the plan's decision."""
        return next(step for step in self.steps if step.is_planned)

    @property
    def fastest(self) -> VerifiedStep:
        """The shortest measured step with the plan's strategy and kernel."""
        wanted = self.planned.strategy, self.planned.kernel
        return min(
            (step for step in self.steps if (step.strategy, step.kernel) == wanted),
            key=lambda step: step.step_seconds,
        )

    @property
    def one_chunk(self) -> VerifiedStep:
        """The step in one chunk."""
        return next(step for step in self.steps if step.forward_degree == 1)

    @property
    def is_inside(self) -> bool:
        """Whether the plan's measured step is inside its predicted range."""
        if self.range_seconds is None:
            return True
        low, high = self.range_seconds
        return low <= self.planned.step_seconds <= high

    @property
    def has_lost(self) -> bool:
        """Whether one chunk is faster than the plan by more than the noise of measurements."""
        return self.planned.step_seconds > (1 + LOST) * self.one_chunk.step_seconds

    @property
    def holds(self) -> bool:
        """Whether the numbers are equal, and the step as predicted and no slower than one chunk."""
        return self.is_equal and self.is_inside and not self.has_lost

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune verify`."""
        return {
            "schema": VERIFICATION_SCHEMA, **encode(self), "is_equal": self.is_equal,
            "is_inside": self.is_inside, "has_lost": self.has_lost,
        }  # fmt: skip

    @property
    def is_equal(self) -> bool:
        """Whether every decision gives the numbers of one chunk, within the tolerance."""
        return all(step.deviation <= self.tolerance for step in self.steps)


def verify_plan(
    plan: Plan,
    *,
    profile: Profile | None,
    num_ranks: int | None,
    launch: Launch | None,
    environ: Mapping[str, str],
    oversubscribe: bool,
) -> Verification | None:
    """Run the plan's layer at every degree and return the comparison, or None on ranks above 0.

    Args:
        profile: the plan's profile, to predict the other degrees.
        num_ranks: number of ranks to start; default, the plan's number.
        oversubscribe: whether ranks may share a core.

    Raises:
        InputError: the plan is for another number of ranks, for a whole model, for a routing that
            tokens cannot follow, or for more ranks than there are cores or GPUs; or its phases
            have different numbers of chunks.
        MoetuneError: a rank failed.
    """
    workload, decisions = plan.workload, _decisions(plan)
    expert_shares(workload)  # raises its errors before ranks are started
    ranks = _started_ranks(plan, launch.world_size if launch else num_ranks)
    from moetune.app.launch import run_on_ranks

    measured = run_on_ranks(
        _measure, (workload, decisions), num_ranks=ranks, launch=launch, environ=environ,
        oversubscribe=oversubscribe,
    )  # fmt: skip
    if launch is not None and launch.rank:
        return None
    costs = None
    if profile is not None:
        costs = costs_of(profile, allow_modelled=plan.inputs.pinned.allow_modelled)
    return Verification(
        plan_id=plan.id,
        steps=tuple(_verified(plan, costs, steps) for steps in measured),
        tolerance=_TOLERANCES[plan.inputs.dtype],
        imbalance=measured[0].imbalance,
        range_seconds=plan.range_seconds if plan.range_seconds[0] < plan.range_seconds[1] else None,
        planned_imbalance=workload.skew.mean,
        kernel=plan.kernel.name if plan.kernel else "",
    )


def _started_ranks(plan: Plan, ranks: int | None) -> int:
    """Return the plan's number of ranks; raise InputError if `ranks` is another number."""
    planned_ranks = plan.layout.expert_ranks
    if ranks and ranks != planned_ranks:
        raise InputError(
            f"plan {plan.id[:6]} is for {planned_ranks} ranks, there are {ranks}",
            f"make a plan with `moetune plan --world-size {ranks}`, or run this on its ranks",
        )
    return planned_ranks


def _decisions(plan: Plan) -> tuple[Decision, ...]:
    """Return the decisions to run: one chunk, no reuse, other degrees, the plan, other kernels."""
    planned = plan.decide(plan.inputs.tokens_per_rank)
    degrees = (
        planned.with_degree(degree)
        for degree in (*DEGREES, planned.degree)
        if degree == planned.degree or 1 < degree <= plan.inputs.tokens_per_rank
    )
    one_chunk = replace(SAFE_DECISION, order=planned.order, kernel=planned.kernel)
    without_reuse = replace(planned, strategy="none")
    kernels = plan.kernel.others if plan.kernel else ()
    by_kernel = (replace(planned, kernel=kernel.name) for kernel in kernels)
    return tuple(dict.fromkeys((one_chunk, without_reuse, *degrees, *by_kernel)))


def _verified(plan: Plan, costs: Costs | None, measured: "MeasuredSteps") -> VerifiedStep:
    decision, planned = measured.decision, plan.decide(plan.inputs.tokens_per_rank)
    predicted = None
    if decision == planned:
        predicted = plan.predicted.step_seconds
    elif costs is not None and decision.kernel == planned.kernel:
        with suppress(ProfileError):  # it cannot be predicted
            predicted = plan_step(plan=plan, costs=costs, decision=decision).seconds
    return VerifiedStep(
        forward_degree=decision.forward_degree,
        backward_degree=decision.backward_degree,
        strategy=decision.strategy,
        is_planned=decision == planned,
        predicted_seconds=predicted,
        forward_seconds=statistics.median(measured.forward_seconds),
        backward_seconds=statistics.median(measured.backward_seconds),
        step_seconds=statistics.median(measured.step_seconds),
        raw_step_seconds=measured.step_seconds,
        deviation=measured.deviation,
        kernel=decision.kernel or "",
    )


def _measure(layer: tuple[Workload, Sequence[Decision]], _: object) -> "Sequence[MeasuredSteps]":
    """Measure on this rank; all ranks of the launch call this together."""
    from moetune.app.launch import rank_device
    from moetune.measure.kernels import able_kernels
    from moetune.measure.steps import measure_steps, random_steps

    (workload, decisions), device = layer, rank_device()
    planned = decisions[0].kernel  # kept, so that a kernel that cannot run is an error on all ranks
    able = {planned, *able_kernels(workload, device=device)}
    decisions = [decision for decision in decisions if decision.kernel in able]
    steps = random_steps(workload, device=device)
    return measure_steps(steps, decisions, num_rounds=NUM_ROUNDS)
