"""One MoE layer inside a layout: its step at the best degrees, and what it keeps."""

from dataclasses import replace

from moetune.domain.costs import Costs, Estimate
from moetune.domain.layer import Workload
from moetune.domain.plan import ExpertParallel, Memory
from moetune.domain.units import dtype_bytes
from moetune.solve.choice import Bounds, DegreeChooser
from moetune.solve.layout_ranks import Group
from moetune.solve.memory import layer_memory, middle_elements
from moetune.solve.phases import NOTHING, PHASES, LayerCosts, layer_costs, total
from moetune.solve.predict import PhaseTime, StepTime


def best_moe_step(
    *,
    expert_parallel: ExpertParallel,
    workload: Workload,
    group: Group,
    costs: Costs,
    bounds: Bounds,
) -> StepTime:
    """Return the layer's fastest step within the bounds; everything is kept (strategy none).

    Args:
        workload: one micro-batch on the group's ranks.
        group: where those ranks lie.

    Raises:
        ProfileError: an operation was not measured.
    """
    if expert_parallel == "tensor":
        return best_summed_step(workload=workload, costs=costs, bounds=bounds, group=group)
    layer = layer_costs(workload=workload, costs=costs, num_nodes=group.num_nodes)
    chooser = DegreeChooser(costs=layer, bounds=bounds)
    tokens = workload.tokens_per_rank
    forward, backward = chooser.best(tokens)
    return StepTime(forward=forward, backward=backward, overhead=layer.overhead(tokens=tokens))


def best_summed_step(*, workload: Workload, costs: Costs, bounds: Bounds, group: Group) -> StepTime:
    """Return the step of experts inside a tensor-parallel group, in one chunk.

    Every rank sees all tokens and computes the T·k/tp rows of its own experts; one all-reduce
    adds the outputs forward and the gradients of the input backward (PPMoE §3.3).

    Args:
        workload: `world_size` is tp, `tokens_per_rank` what every rank of the group sees.
        bounds: of the degree, which is 1 here whatever they allow.
    """
    assert bounds.max_degree >= 1  # noqa: S101 - one chunk is always allowed
    layer = layer_costs(workload=workload, costs=costs, num_nodes=group.num_nodes)
    rows = workload.rows / workload.world_size
    sums = sum_over(group, workload=workload, costs=costs)
    forward, backward = (layer.compute(phase=phase, rows=rows) for phase in PHASES)
    gate = total(*(layer.gate(phase, tokens=workload.tokens_per_rank) for phase in PHASES))
    return StepTime(
        forward=_in_one_chunk(forward, sums), backward=_in_one_chunk(backward, sums), overhead=gate
    )


def sum_over(group: Group, *, workload: Workload, costs: Costs) -> Estimate:
    """Return one all-reduce of the micro-batch's tokens over the group; 0 in a group of one."""
    if group.size == 1:
        return NOTHING
    return costs.collective(
        op="all_reduce",
        group_size=group.size,
        num_bytes=workload.tokens_per_rank * workload.layer.d_model * dtype_bytes(workload.dtype),
        num_nodes=group.num_nodes,
    )


def _in_one_chunk(compute: Estimate, sums: Estimate) -> PhaseTime:
    return PhaseTime(
        degree=1,
        seconds=compute.seconds + sums.seconds,
        transfer=sums,
        compute=compute,
        num_transfers=1,
    )


def phase_overheads(
    *, expert_parallel: ExpertParallel, layer: LayerCosts, tokens: int
) -> tuple[Estimate, Estimate]:
    """Return the share of `StepTime.overhead` that each phase has, forward first."""
    if expert_parallel == "tensor":
        forward, backward = (layer.gate(phase, tokens=tokens) for phase in PHASES)
    else:
        forward, backward = (layer.phase_overhead(phase, tokens=tokens) for phase in PHASES)
    return forward, backward


def moe_memory(
    *, expert_parallel: ExpertParallel, workload: Workload, degrees: tuple[int, int]
) -> Memory:
    """Return what the layer keeps on one rank.

    Inside a tensor-parallel group the input and the output are whole and the T·k/tp rows of the
    rank's own experts are kept: 2·T·M + (T·k/tp)·(2·M + H) elements; buffers hold the rows
    again, or in more chunks everything, as in `layer_memory`.
    """
    exchanged = layer_memory(
        workload=workload, forward_degree=degrees[0], backward_degree=degrees[1]
    )
    if expert_parallel == "all_to_all":
        return exchanged
    layer, tokens = workload.layer, workload.tokens_per_rank
    rows = -(-workload.rows // workload.world_size)
    row = layer.d_model + middle_elements(layer)
    element = dtype_bytes(workload.dtype)
    activations = (2 * tokens * layer.d_model + rows * (layer.d_model + row)) * element
    return replace(
        exchanged,
        activation_bytes=activations,
        buffer_bytes=activations if max(degrees) > 1 else rows * row * element,
    )
