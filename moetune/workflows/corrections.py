"""Correct a stored profile by the operations that jobs and verifications observed.

`update_corrections` is called where observations enter the store: by `moetune verify` and by the
service. It judges the newest ones; the profile then has factors on its costs, and every plan that
is made with it, on the command line and by the service, takes them into account.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from moetune.domain.corrections import Correction, distance_octaves
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.layer import PHASES
from moetune.domain.operations import Operation, OperationTimes, corrected_op, operations_of
from moetune.domain.plan import Decision, Plan
from moetune.domain.ports import Store
from moetune.domain.profile import Profile, is_same_but_for_corrections
from moetune.domain.records import Observation, Stored
from moetune.domain.storable import is_sound
from moetune.fit.corrections import Evidence, Judged, judge
from moetune.fit.costs import costs_of
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.observed import watched_seconds
from moetune.solve.layer.parallelism import layer_costs

MOST_OBSERVATIONS = 400
"""Newest observations that are judged."""
LEAST_CHANGE = 0.05
"""Of a factor: smaller changes would make new plans for nothing."""
_TOLERANCE = 1.25
_NUM_ROUNDS = 4
_SMALLEST = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Correcting:
    """The outcome of judging a profile's observations.

    Args:
        corrections: those in force from now on.
        is_changed: whether they differ from those before.
        refused: why observations, or operations, correct nothing.
        waiting: operations that need more calls.
    """

    corrections: tuple[Correction, ...]
    is_changed: bool
    refused: tuple[str, ...]
    waiting: tuple[str, ...] = ()


def update_corrections(store: Store, name: str) -> Correcting:
    """Judge the newest observations of a profile's plans and save the factors that changed.

    Raises:
        MoetuneError: the store cannot be read or written.
    """
    profile = store.profile(name)
    if profile is None or profile.provenance != "measured":
        reason = f"profile {name!r} was not measured here, and observations do not correct it"
        return Correcting(corrections=(), is_changed=False, refused=(reason,))
    judged = judge_observations(profile, _observed(store, name))
    is_changed = _differ(profile.corrections, judged.corrections)
    if is_changed:
        _save(store, replace(profile, corrections=judged.corrections))
    kept = judged.corrections if is_changed else profile.corrections
    return Correcting(
        corrections=kept, is_changed=is_changed, refused=judged.refused, waiting=judged.waiting
    )  # fmt: skip


def judge_observations(
    profile: Profile, observed: Sequence[tuple[Plan, Stored[Observation]]]
) -> Judged:
    """Return the corrections of the profile that observations support.

    Args:
        observed: observations and their plans, oldest first.
    """
    judging = _Judging(replace(profile, corrections=()))
    evidence: list[Evidence] = []
    refused: list[str] = []
    for plan, stored in observed:
        reason = judging.problem(plan, stored.value)
        try:
            evidence += () if reason else judging.evidence(plan, stored)
        except ProfileError as error:
            reason = error.what
        if reason:
            refused.append(f"observation {stored.id}: {reason}")
    found = judge(evidence)
    return replace(found, refused=(*found.refused, *dict.fromkeys(refused)))


class _Judging:
    """Compares observations with what the profile predicts, without its corrections."""

    def __init__(self, base: Profile) -> None:
        self._base, self._digest = base, base.digest

    def problem(self, plan: Plan, observation: Observation) -> str:
        """Return why an observation says nothing of the profile's costs; "" if it does."""
        reasons = self._plan_problems(plan, observation) or _clock_problems(observation)
        return next(iter(reasons), "")

    def _plan_problems(self, plan: Plan, observation: Observation) -> tuple[str, ...]:
        """Return why an observation is not of this plan, profile and machine."""
        machine, fingerprint = self._base.fingerprint.device_id, plan.inputs.profile_fingerprint
        operations = {times.operation for times in observation.operations}
        expected = operations_of(plan.workload, _decision(plan, observation))
        short = plan.id[:6]
        problems = {
            "it has no operations": not operations,
            f"it is of plan {observation.plan_id[:6]}, not {short}": (
                observation.plan_id != plan.id
            ),
            f"plan {short} was made with another profile {self._base.name!r}": (
                not is_same_but_for_corrections(fingerprint, self._digest)
            ),
            "it was made on another machine than the profile, or does not say on which": (
                not machine or observation.device_id != machine
            ),
            f"plan {short} reuses memory, and its transfers wait for buffers": (
                plan.memory.strategy != "none"
            ),
            f"it has {observation.tokens_per_rank:,} tokens, its plan another number": (
                observation.tokens_per_rank != plan.tokens_per_rank
            ),
            f"its operations are not those of plan {short}": (not operations.issubset(expected)),
        }
        return tuple(words for words, is_so in problems.items() if is_so)

    def evidence(self, plan: Plan, stored: Stored[Observation]) -> Iterator[Evidence]:
        """Yield the ratios of the observation's operations to their predictions.

        Raises:
            ProfileError: the profile lacks an operation.
        """
        costs = layer_costs(
            workload=plan.workload,
            costs=costs_of(self._base, allow_modelled=plan.inputs.pinned.allow_modelled),
        )
        for phase in PHASES:
            mine = [times for times in stored.value.operations if times.operation.phase == phase]
            factors = _factors(mine, plan, costs)
            for times in mine:
                is_experts = times.operation.name == "experts"
                middle = statistics.median(times.seconds)
                factor = factors[times.operation]
                yield Evidence(
                    op=corrected_op(times.operation),
                    group_size=0 if is_experts else plan.workload.world_size,
                    size=times.operation.size,
                    batch=stored.id,
                    ratios=tuple(factor * one / middle for one in times.seconds),
                )


def _factors(
    observed: Sequence[OperationTimes], plan: Plan, costs: LayerCosts
) -> dict[Operation, float]:
    """Return the factors on the costs of one phase under which it shows the observed times.

    Transfers and experts change each other's times while they overlap: a few rounds settle it.
    """
    factors = dict.fromkeys((times.operation for times in observed), 1.0)
    for _ in range(_NUM_ROUNDS):
        of_experts = {one.name == "experts": factor for one, factor in factors.items()}
        for times in observed:
            predicted = watched_seconds(
                times.operation,
                workload=plan.workload,
                costs=costs,
                order=plan.pipeline.order,
                transfer_factor=of_experts.get(False, 1.0),
                compute_factor=of_experts.get(True, 1.0),
            )
            factors[times.operation] *= statistics.median(times.seconds) / predicted
    for operation in factors:
        if operation.name == "experts":
            factors[operation] = _of_gemms(factors[operation], operation, plan, costs)
    return factors


def _of_gemms(factor: float, operation: Operation, plan: Plan, costs: LayerCosts) -> float:
    """Return the factor on the experts' GEMMs that is that on all of the experts."""
    rows = plan.workload.rows / operation.degree
    gemm_seconds = sum(one.seconds for one in costs.gemms(operation.phase, rows))
    all_seconds = costs.compute(phase=operation.phase, rows=rows).seconds
    return max(1 + (factor - 1) * all_seconds / gemm_seconds, _SMALLEST)


def _clock_problems(observation: Observation) -> tuple[str, ...]:
    """Return in what the observation's times contradict each other."""
    if min(observation.seconds) <= 0:
        return ("a step took no time: its clock stood still or jumped",)
    longest_seconds = _TOLERANCE * statistics.median(observation.seconds)
    return tuple(
        f"{times.operation.name} took longer than the step around it: a clock jumped"
        for times in observation.operations
        if times.operation.degree * statistics.median(times.seconds) > longest_seconds
    )


def _decision(plan: Plan, observation: Observation) -> Decision:
    own = plan.decide(plan.tokens_per_rank)
    return replace(
        own,
        forward_degree=observation.forward_degree,
        backward_degree=observation.backward_degree,
        strategy=observation.strategy or own.strategy,
    )


def _observed(store: Store, name: str) -> list[tuple[Plan, Stored[Observation]]]:
    """Return the newest observations of plans made with a profile of that name, oldest first."""
    plans: dict[str, Plan | None] = {}
    found = []
    for one in reversed(store.observation_page(None, limit=MOST_OBSERVATIONS)):
        plan_id = one.value.plan_id
        if plan_id not in plans:
            plan = store.plan(plan_id)
            plans[plan_id] = plan if plan is not None and plan.inputs.profile == name else None
        plan = plans[plan_id]
        if plan is not None and is_sound(one.value):
            found.append((plan, one))
    return found


def _differ(before: Sequence[Correction], after: Sequence[Correction]) -> bool:
    """Return whether a factor changed enough for new plans."""
    if len(before) != len(after):
        return True
    return any(
        (one.op, one.group_size) != (other.op, other.group_size)
        or distance_octaves(one.size, other.size) > 1
        or not 1 - LEAST_CHANGE < one.factor / other.factor < 1 + LEAST_CHANGE
        for one, other in zip(before, after, strict=True)
    )


def _save(store: Store, profile: Profile) -> None:
    """Save the corrected profile as a fit of the run that it was measured in."""
    for run in store.runs():
        if run.name == profile.name:
            with suppress(InputError):  # a later run has other samples
                store.save_profile(profile, run_id=run.id)
                return
    store.save_profile(profile)
