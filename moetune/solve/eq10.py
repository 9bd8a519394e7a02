"""MPipeMoE's own rule for choosing a strategy (Eq. 10): an explanation and a baseline.

It takes the busiest of three streams, each at a constant speed, and knows neither start-up
times nor how a pipeline fills. Plans are decided by the timeline (`solve.reuse`).
"""

from moetune.domain.costs import Interference
from moetune.domain.plan_inputs import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Strategy
from moetune.domain.units import dtype_bytes
from moetune.solve.memory import middle_elements
from moetune.solve.phases import PHASES, LayerCosts, Phase

_TRANSFERS = 2


def paper_seconds(*, costs: LayerCosts, strategy: Strategy, tokens: int) -> float:
    """Return C = max(q₁·b·H·M/(σ·W_comp), q₂·b·M·s/(μ·W_comm), q₃·b·M·s/(η·W_mem)), both phases.

    b are the rows of one rank; q are those of Table II in general form: 2 GEMMs forward (3 for
    swiglu), twice as many backward and those that recompute T_M; 2 transfers, and one more where
    T_DI is sent again; copies of T_DI and T_M. The speeds W are those of the whole batch.

    Raises:
        ProfileError: the strategy copies, and no copies were measured.
    """
    return sum(_phase_seconds(costs, strategy, tokens, phase) for phase in PHASES)


def _phase_seconds(costs: LayerCosts, strategy: Strategy, tokens: int, phase: Phase) -> float:
    layer, rows = costs.layer, float(tokens * costs.layer.top_k)
    copied = layer.d_model * (strategy in OFFLOADS_INPUT)
    copied += middle_elements(layer) * (strategy in OFFLOADS_MIDDLE)
    comp_speed, comm_speed, mem_speed = _speeds(costs.costs.interference, copies=copied > 0)
    transfers, products = _TRANSFERS, layer.num_gemms
    if phase == "backward":
        products *= 2
        products += (layer.num_gemms - 1) * (strategy in {"S3", "S4"})
        transfers += strategy in {"S2", "S4"}
    one_product = costs.product("forward", rows=rows).seconds
    one_transfer = costs.transfer(rows=rows, degree=1).seconds
    copy_seconds = 0.0
    if copied:
        copy = costs.costs.copy(
            direction="d2h" if phase == "forward" else "h2d",
            pinned=costs.costs.copy_mode != "pageable",
            num_bytes=rows * copied * dtype_bytes(costs.dtype),
        )
        copy_seconds = copy.seconds
    return max(
        products * one_product / comp_speed,
        transfers * one_transfer / comm_speed,
        copy_seconds / mem_speed,
    )


def _speeds(table: Interference, *, copies: bool) -> tuple[float, float, float]:
    """Return σ, μ and η: beside both others where the strategy copies, else beside each other."""
    if copies:
        return table.comp.all, table.comm.all, table.mem.all
    return table.comp.comm, table.comm.comp, 1.0
