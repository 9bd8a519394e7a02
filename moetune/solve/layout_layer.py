"""The plan of one MoE layer inside a layout, for the layer that runs there."""

from collections.abc import Sequence
from dataclasses import replace

from moetune.domain.costs import Costs, Trust, least_trust
from moetune.domain.layer import Workload
from moetune.domain.plan import Layout, Memory, Pipeline, Plan, PlanInputs, Predicted, Verdict
from moetune.domain.profile import Provenance
from moetune.domain.units import format_seconds
from moetune.solve.choice import Bounds
from moetune.solve.layout_ranks import Group
from moetune.solve.plan import solve_plan
from moetune.solve.predict import StepTime
from moetune.solve.strategies import UNLIMITED
from moetune.solve.words import binding_resource


def exchanged_layer(
    *,
    inputs: PlanInputs,
    workload: Workload,
    group: Group,
    costs: Costs,
    resamples: Sequence[Costs],
    bounds: Bounds,
    provenance: Provenance,
) -> Plan:
    """Return the plan of a layer whose experts are exchanged among the group's ranks.

    Its memory is no bound: the search over layouts has seen that it fits.

    Args:
        inputs: of the model; the layer's profile and dtype.
    """
    return solve_plan(
        inputs=_layer_inputs(inputs, workload),
        costs=costs,
        resamples=resamples,
        bounds=replace(bounds, strategy="none"),
        device_memory_bytes=UNLIMITED,
        provenance=provenance,
        num_nodes=group.num_nodes,
    )


def summed_layer(
    *,
    inputs: PlanInputs,
    layout: Layout,
    workload: Workload,
    step: StepTime,
    memory: Memory,
    provenance: Provenance,
) -> Plan:
    """Return the plan of a layer whose experts lie inside a tensor-parallel group.

    Args:
        step: the layer's best.
    """
    layer = _layer_inputs(inputs, workload)
    forward, backward = step.degrees
    sums = format_seconds(step.forward.transfer.seconds)
    return Plan(
        id=layer.plan_id,
        inputs=layer,
        layout=layout,
        pipeline=Pipeline(
            forward_degree=forward,
            backward_degree=backward,
            order="dispatch_first",
            ranges=((1, workload.tokens_per_rank, forward, backward),),
        ),
        memory=memory,
        chunks=None,
        predicted=_predicted(step, provenance),
        decision=Verdict(
            probability_best=1.0,
            expected_regret=0.0,
            runner_up=None,
            binding=binding_resource(step),
            why=f"The experts' outputs are added by one all-reduce of {sums} each way.",
        ),
        alternatives=(),
        warnings=(),
    )


def _predicted(step: StepTime, provenance: Provenance) -> Predicted:
    """Return the times of a step in one chunk, which no refits were asked about."""
    not_measured: tuple[Trust, ...] = () if provenance == "measured" else ("modelled",)
    return Predicted(
        forward_seconds=step.forward.seconds,
        backward_seconds=step.backward.seconds,
        step_seconds=step.seconds,
        sequential_forward_seconds=step.forward.seconds,
        sequential_backward_seconds=step.backward.seconds,
        overhead_seconds=step.overhead.seconds,
        p05_step_seconds=step.seconds,
        p95_step_seconds=step.seconds,
        trust=least_trust((step.trust, *not_measured)),
    )


def _layer_inputs(inputs: PlanInputs, workload: Workload) -> PlanInputs:
    return replace(
        inputs,
        world_size=workload.world_size,
        tokens_per_rank=workload.tokens_per_rank,
        memory_limit_bytes=None,
        constraints={},
    )
