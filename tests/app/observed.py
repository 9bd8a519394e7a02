"""Observations of a layer's plan on machines that are as a profile says."""

import statistics
from dataclasses import replace

import numpy as np

from moetune.app.plan import PlanRequest, make_plan
from moetune.domain.constraints import Order
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.operations import Operation, OperationTimes, operations_of, transfer_seconds
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.records import Observation
from moetune.fit.costs import costs_of
from moetune.solve.layer.costs import LayerCosts, layer_costs
from moetune.solve.layer.operations import NOTHING
from moetune.solve.layer.timeline import COMPUTE, simulate
from moetune.solve.layer.times import phase_tasks, phase_time
from tests.fit.measured import FINGERPRINT, measured_profile

LAYER = LayerShape(d_model=512, d_hidden=2048, num_experts=8, top_k=1, activation="gelu")
PROFILE = measured_profile()
REQUEST = PlanRequest(layer=LAYER, tokens_per_rank=4096, dtype="float32", world_size=4)
PLAN = make_plan(REQUEST, profile=PROFILE)


def watched_seconds(
    operation: Operation,
    *,
    workload: Workload,
    costs: LayerCosts,
    order: Order,
) -> float:
    """Return the time that a watched call shows of one of its operations, of a simulated phase."""
    degree, tokens = operation.degree, workload.tokens_per_rank
    time = phase_time(costs=costs, phase=operation.phase, tokens=tokens, degree=degree, order=order)
    tasks = phase_tasks(replace(time, gathering=NOTHING), order)
    table = costs.interference(rows=costs.rows(tokens, degree=degree), degree=degree)
    timeline = simulate(tasks, interference=table)
    compute_seconds = statistics.fmean(
        span.end_seconds - span.start_seconds for span in timeline.spans if span.stream == COMPUTE
    )
    if operation.name == "experts":
        return compute_seconds
    return transfer_seconds(
        workload, degree=degree, phase_seconds=timeline.makespan_seconds,
        compute_seconds=compute_seconds,
    )  # fmt: skip


def observed(
    plan: Plan, truth: Profile, *, num: int = 4, seed: int = 0, noise: float = 0.03
) -> Observation:
    """Return what a job shows whose machine is as `truth` says, with noise."""
    rng = np.random.default_rng(seed)
    costs = layer_costs(workload=plan.workload, costs=costs_of(truth))
    decision = plan.decide(plan.tokens_per_rank)

    def times(operation: Operation) -> OperationTimes:
        seconds = watched_seconds(
            operation, workload=plan.workload, costs=costs, order=plan.pipeline.order
        )
        noisy = tuple((seconds * np.exp(noise * rng.normal(size=num))).tolist())
        return OperationTimes(operation=operation, predicted_seconds=None, seconds=noisy)

    operations = tuple(times(one) for one in operations_of(plan.workload, decision))
    return Observation(
        plan_id=plan.id, forward_degree=decision.forward_degree,
        backward_degree=decision.backward_degree, tokens_per_rank=plan.tokens_per_rank,
        predicted_seconds=plan.predicted.step_seconds, seconds=(1.0,) * num, source="training",
        operations=operations, device_id=FINGERPRINT.device_id,
    )  # fmt: skip
