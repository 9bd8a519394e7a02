"""A request and a profile made a plan: fit the costs, solve, and keep the terms."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from moetune.domain.cluster import HOST_MEMORY
from moetune.domain.errors import ProfileError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.request import PlanInputs, PlanRequest
from moetune.domain.samples import CollectiveOp
from moetune.fit.costs import costs_of
from moetune.fit.resample import resample_costs
from moetune.solve.layer.plan import SolvedPlan, solve_plan
from moetune.solve.layout.plan import LayoutProblem, solve_layout
from moetune.workflows.profiles import FoundProfile

NUM_RESAMPLES = 100
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """A request with every default filled in, and the profile to plan with."""

    request: PlanRequest
    inputs: PlanInputs
    found: FoundProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A new plan, and the profile it was made with."""

    plan: Plan
    found: FoundProfile


def make_plan(request: PlanRequest, *, profile: Profile, fingerprint: str | None = None) -> Plan:
    """Return the best plan for the request on the profile's machine.

    Args:
        fingerprint: the profile's digest, where it is known; it takes long to work out.

    Raises:
        InputError: the experts, or a whole model, do not divide by the ranks, or the dtype is
            unknown.
        InfeasiblePlanError: nothing satisfies the bounds or the memory limit.
        ProfileError: the profile lacks an operation that the layer needs.
    """
    solved = _solve(request, profile, fingerprint)
    plan = replace(solved.plan, terms=solved.terms)
    if plan.transformer is not None:
        return plan
    return replace(plan, warnings=(*_stand_in(plan, profile), *plan.warnings))


def host_memory_bytes(profile: Profile) -> int | None:
    """Return the memory of one node's host; None where the profile does not know it."""
    machine = profile.machine
    if machine.kind == "cpu":
        return machine.memory_bytes * machine.devices_per_node
    known = profile.fingerprint.hardware.get(HOST_MEMORY, "")
    return int(known) if known.isdigit() else None


@contextmanager
def sound_numbers(profile: str) -> Iterator[None]:
    """Say whose numbers are to blame where arithmetic fails: profiles come from strangers.

    Raises:
        ProfileError: something overflowed, or was no number.
    """
    try:
        yield
    except (ArithmeticError, ValueError) as error:
        raise ProfileError(
            f"profile {profile!r} has numbers that nothing can be computed from: {error}",
            "look at it with `moetune profiles show`, and measure it again",
        ) from error


def _solve(request: PlanRequest, profile: Profile, fingerprint: str | None) -> SolvedPlan:
    inputs = request.inputs_for(profile, fingerprint=fingerprint)
    constraints, whole, machine = request.constraints, request.whole, profile.machine
    allowed = constraints.allow_modelled
    costs = costs_of(profile, allow_modelled=allowed)
    resamples = resample_costs(profile, num=NUM_RESAMPLES, seed=SEED, allow_modelled=allowed)
    if whole is None:
        return solve_plan(
            inputs=inputs,
            costs=costs,
            resamples=resamples,
            bounds=constraints.bounds,
            device_memory_bytes=machine.memory_bytes,
            provenance=profile.provenance,
        )
    return solve_layout(
        LayoutProblem(
            inputs=inputs,
            model=whole,
            pins=constraints.pins,
            costs=costs,
            resamples=resamples,
            bounds=constraints.bounds,
            per_node=machine.devices_per_node,
            runs_ahead=machine.kind == "cuda",
            device_memory_bytes=machine.memory_bytes,
            host_memory_bytes=host_memory_bytes(profile),
            provenance=profile.provenance,
        )
    )


def _stand_in(plan: Plan, profile: Profile) -> tuple[str, ...]:
    """Say which group size stands in for the plan's, where that one was not measured."""
    ranks = plan.layout.expert_ranks
    missing = []
    for op in _exchanges(plan):
        sizes = {line.group_size for line in profile.collective if line.op == op}
        for sample in profile.samples:
            if sample.point.kind == "collective" and sample.point.op == op:
                sizes.add(sample.point.group_size)
        if ranks > 1 and ranks not in sizes:
            known = ", ".join(map(str, sorted(sizes)))
            missing.append(
                f"no {op} was measured for {ranks} ranks: the nearest of {known} stands in for it"
            )
    return tuple(missing)


def _exchanges(plan: Plan) -> tuple[CollectiveOp, ...]:
    if plan.workload.sequence_parallel:
        return "all_gather", "reduce_scatter"
    return ("all_reduce",) if plan.layout.expert_parallel == "tensor" else ("all_to_all",)
