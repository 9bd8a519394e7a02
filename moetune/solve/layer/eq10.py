"""MPipeMoE's rule for a memory strategy, Eq. 10: shown next to the timeline, it decides nothing."""

from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Strategy
from moetune.domain.cost_keys import CopyKey
from moetune.domain.interference import Interference
from moetune.domain.layer import PHASES, Phase
from moetune.domain.samples import Direction
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.peak import middle_elements


def paper_seconds(*, costs: LayerCosts, strategy: Strategy, tokens: int) -> float:
    """Return the step of Eq. 10.

        C = max(q₁·b·H·M/(σ·W_comp), q₂·b·M·s/(μ·W_comm), q₃·b·M·s/(η·W_mem)), both phases

    b are the rows of one rank; q are those of Table II in general form: 2 GEMMs forward (3 for
    swiglu), twice as many backward and those that recompute T_M; 2 transfers, and one more where
    T_DI is sent again; copies of T_DI and T_M. The speeds W are those of the whole batch. The
    equation omits start-up times and the filling of the pipeline.

    Raises:
        ProfileError: the strategy copies, and no copies were measured.
    """
    return sum(_paper_phase(costs, strategy, tokens, phase) for phase in PHASES)


def _paper_phase(costs: LayerCosts, strategy: Strategy, tokens: int, phase: Phase) -> float:
    layer, rows = costs.layer, costs.rows(tokens)
    copied = layer.d_model * (strategy in OFFLOADS_INPUT)
    copied += middle_elements(layer) * (strategy in OFFLOADS_MIDDLE)
    comp_speed, comm_speed, mem_speed = _speeds(costs.costs.interference, copies=copied > 0)
    transfers, gemms = costs.num_transfers, layer.num_gemms
    if phase == "backward":
        gemms *= 2
        gemms += (layer.num_gemms - 1) * (strategy in {"S3", "S4"})
        transfers += strategy in {"S2", "S4"}
    one_gemm = costs.gemm("forward", rows=rows).seconds
    one_transfer = costs.transfer(rows=rows, degree=1).seconds
    copy_seconds = 0.0
    if copied:
        way: Direction = "d2h" if phase == "forward" else "h2d"
        copy = CopyKey(way, costs.costs.copy_mode != "pageable")
        num_bytes = rows * copied * dtype_bytes(costs.dtype)
        copy_seconds = costs.costs.seconds(copy, num_bytes).seconds
    return max(
        gemms * one_gemm / comp_speed,
        transfers * one_transfer / comm_speed,
        copy_seconds / mem_speed,
    )


def _speeds(table: Interference, *, copies: bool) -> tuple[float, float, float]:
    """Return σ, μ and η: with both others running where the strategy copies, else with one."""
    if copies:
        return table.comp.all, table.comm.all, table.mem.all
    return table.comp.comm, table.comm.comp, 1.0
