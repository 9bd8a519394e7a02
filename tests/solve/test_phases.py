"""What a chunk computes, sends and launches in each phase of a layer."""

from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.cost_keys import CostKey, RowsKey
from moetune.domain.costs import Costs, Estimate, LinearCost, Number
from moetune.domain.layer import PHASES, Activation, LayerShape, Phase, Workload
from moetune.domain.samples import HOST_CHUNKS, LAUNCHES
from moetune.solve.layer.costs import LayerCosts, layer_costs
from tests.solve.costs_by_hand import LinearCosts

ALPHA, BETA = 1e-3, 1e-9
D_MODEL, D_HIDDEN, ROWS = 8, 32, 50.0
MACS = ROWS * D_MODEL * D_HIDDEN

SENT = 13 / 14
"""Rows that travel, over the pairs: two of eight experts are on one of four ranks in 1 of 7."""


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
    gemms_alone = LinearCosts(gemm_cost=LinearCost(alpha_seconds=ALPHA, beta_seconds=BETA))
    layer = _layer(gemms_alone, activation=activation)
    chunk = layer.compute(phase=phase, rows=ROWS)
    assert chunk.seconds == pytest.approx(num_gemms * (ALPHA + BETA * MACS))


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
    num_bytes = 10 * 8 * 2 * SENT
    assert layer.transfer(rows=10.0, degree=4).seconds == pytest.approx(1 + 0.5 * num_bytes)
    assert layer.transfer(rows=10.0, degree=1).seconds == pytest.approx(2 * (1 + 0.5 * num_bytes))


def test_overhead_is_gate_and_permutation_there_and_back() -> None:
    costs = LinearCosts(
        gemm_cost=LinearCost(alpha_seconds=ALPHA, beta_seconds=BETA),
        rows_seconds={"gate": 2.0, "gate_backward": 3.0, "gather": 5.0, "scatter_add": 7.0},
    )
    tokens, experts, top_k = 100, 8, 2
    gate = 3 * (ALPHA + BETA * tokens * D_MODEL * experts) + (2.0 + 3.0) * tokens * experts
    permutation = 2 * (5.0 + 7.0) * tokens * top_k * D_MODEL * SENT
    assert _layer(costs).overhead(tokens=tokens).seconds == pytest.approx(gate + permutation)


WORKLOAD = Workload(
    layer=LayerShape(d_model=64, d_hidden=128, num_experts=8, top_k=2), world_size=2,
    tokens_per_rank=64,
)  # fmt: skip
ONCE: dict[Phase, float] = {"forward": 2e-3, "backward": 3e-3}
EACH: dict[Phase, float] = {"forward": 4e-4, "backward": 8e-4}


class LaunchingCosts(LinearCosts):
    """A layer's launches: the phase's start and each chunk."""

    def knows(self, key: CostKey) -> bool:
        return key[0] in LAUNCHES or super().knows(key)

    def seconds(self, key: CostKey, size: Number) -> Estimate[Number]:
        if not isinstance(key, RowsKey) or key.op not in LAUNCHES:
            return super().seconds(key, size)
        assert size in HOST_CHUNKS
        phases = PHASES if key.op.endswith("_step") else PHASES[:1]
        seconds = sum((ONCE[phase] + EACH[phase] * size for phase in phases), 0.0 * size)
        return Estimate(seconds=seconds, trust="measured")


def costs_of(costs: LinearCosts, **changes: object) -> LayerCosts:
    return layer_costs(workload=replace(WORKLOAD, **changes), costs=costs)  # type: ignore[arg-type]  # its fields


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["all_to_all", "tensor"])
def test_small_chunks_take_the_time_of_their_launches(phase: Phase, kind: str) -> None:
    costs = costs_of(LaunchingCosts(), expert_parallel=kind)
    assert costs.compute(phase=phase, rows=1.0).seconds == pytest.approx(EACH[phase])
    assert costs.overhead(tokens=8).seconds == pytest.approx(sum(ONCE.values()))
    halves = costs.halves(phase, 1.0, recompute=True)
    assert sum(half.seconds for half in halves) == pytest.approx(EACH[phase])


@pytest.mark.parametrize("phase", PHASES)
def test_large_chunks_take_the_time_of_their_products(phase: Phase) -> None:
    costs, rows = costs_of(LaunchingCosts()), 1e7
    alone = costs_of(LinearCosts())
    assert costs.compute(phase=phase, rows=rows) == alone.compute(phase=phase, rows=rows)
    assert costs.halves(phase, rows, recompute=False) == alone.halves(phase, rows, recompute=False)
    many = costs.compute(phase=phase, rows=np.array([1.0, rows])).seconds
    assert many.tolist() == pytest.approx(
        [EACH[phase], alone.compute(phase=phase, rows=rows).seconds]
    )
