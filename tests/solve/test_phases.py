"""What a chunk computes and sends in each phase of a layer."""

import pytest

from moetune.domain.costs import Costs, LinearCost
from moetune.domain.layer import Activation, LayerShape, Phase, Workload
from moetune.solve.layer.costs import LayerCosts, layer_costs
from tests.solve.costs_by_hand import LinearCosts

ALPHA, BETA = 1e-3, 1e-9
D_MODEL, D_HIDDEN, ROWS = 8, 32, 50.0
MACS = ROWS * D_MODEL * D_HIDDEN


def _layer(
    costs: Costs,
    *,
    activation: Activation = "gelu",
    num_experts: int = 8,
    world_size: int = 4,
    top_k: int = 2,
) -> LayerCosts:
    shape = LayerShape(
        d_model=D_MODEL,
        d_hidden=D_HIDDEN,
        num_experts=num_experts,
        top_k=top_k,
        activation=activation,
    )
    workload = Workload(layer=shape, world_size=world_size, tokens_per_rank=100, dtype="bfloat16")
    return layer_costs(workload=workload, costs=costs)


def _gemms_only() -> LinearCosts:
    return LinearCosts(gemm_cost=LinearCost(alpha_seconds=ALPHA, beta_seconds=BETA))


@pytest.mark.parametrize(
    ("activation", "phase", "num_gemms"),
    [
        ("gelu", "forward", 2),
        ("gelu", "backward", 4),
        ("relu", "forward", 2),
        ("swiglu", "forward", 3),
        ("swiglu", "backward", 6),
    ],
)
def test_a_chunk_has_as_many_products_as_its_experts_and_phase(
    activation: Activation, phase: Phase, num_gemms: int
) -> None:
    layer = _layer(_gemms_only(), activation=activation)
    found = layer.compute(phase=phase, rows=ROWS)
    assert found.seconds == pytest.approx(num_gemms * (ALPHA + BETA * MACS))


@pytest.mark.parametrize(
    ("phase", "elements"),
    [
        # The activation over H, and twice the sorting of rows over M.
        ("forward", 2.0 * D_HIDDEN + 2 * 5.0 * D_MODEL),
        # The activation again, its derivative, and the sorting.
        ("backward", 2.0 * D_HIDDEN + 3.0 * D_HIDDEN + 2 * 5.0 * D_MODEL),
    ],
)
def test_measured_row_operations_are_added_to_a_chunk(phase: Phase, elements: float) -> None:
    free = LinearCost(alpha_seconds=0.0, beta_seconds=0.0)
    costs = LinearCosts(
        gemm_cost=free, rows_seconds={"gelu": 2.0, "gelu_backward": 3.0, "gather": 5.0}
    )
    layer = _layer(costs)
    assert layer.compute(phase=phase, rows=ROWS).seconds == pytest.approx(elements * ROWS)


def test_a_transfer_costs_the_chunks_bytes_and_knows_how_many_are_in_flight() -> None:
    costs = LinearCosts(
        transfer_cost=LinearCost(alpha_seconds=1.0, beta_seconds=0.5), alone_factor=2.0
    )
    layer = _layer(costs)
    assert layer.transfer(rows=10.0, degree=4).seconds == pytest.approx(1 + 0.5 * 10 * 8 * 2)
    assert layer.transfer(rows=10.0, degree=1).seconds == pytest.approx(2 * (1 + 0.5 * 160))


def test_overhead_is_gate_and_permutation_there_and_back() -> None:
    costs = LinearCosts(
        gemm_cost=LinearCost(alpha_seconds=ALPHA, beta_seconds=BETA),
        rows_seconds={"gate": 2.0, "gate_backward": 3.0, "gather": 5.0, "scatter_add": 7.0},
    )
    tokens, experts, top_k = 100, 8, 2
    gate = 3 * (ALPHA + BETA * tokens * D_MODEL * experts) + (2.0 + 3.0) * tokens * experts
    permutation = 2 * (5.0 + 7.0) * tokens * top_k * D_MODEL
    assert _layer(costs).overhead(tokens=tokens).seconds == pytest.approx(gate + permutation)
