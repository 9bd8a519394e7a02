"""What the host needs to start a block's operations, in the price of a layout."""

from dataclasses import replace

import pytest

from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.samples import HOST_ROWS, HOST_WIDTH
from moetune.solve.model.cost_parts import CostPart
from moetune.solve.model.costs import Parts
from moetune.solve.model.groups import Group
from tests.solve.costs_by_hand import LinearCosts

MODEL = Transformer(
    moe=LayerShape(d_model=64, d_hidden=128, num_experts=4), num_layers=2, num_heads=4,
    length=8, vocab_size=32,
)  # fmt: skip
FORWARD, STEP = 3e-3, 8e-3
PER_ELEMENT = HOST_ROWS * HOST_WIDTH
MEASURED = LinearCosts(
    rows_seconds={"dense_block": FORWARD / PER_ELEMENT, "dense_block_step": STEP / PER_ELEMENT}
)


def pieces_of(costs: LinearCosts, *, runs_ahead: bool, sequences: int = 1) -> dict[str, CostPart]:
    parts = Parts(
        model=MODEL, dtype="float32", num_sequences=sequences, tensor=Group(size=1), costs=costs,
        runs_ahead=runs_ahead,
    )  # fmt: skip
    backbone = parts.backbone()
    return {piece.name: piece for piece in (*backbone.attention, *backbone.ffn)}


def test_a_cpu_starts_operations_in_the_place_of_computing() -> None:
    launches = pieces_of(MEASURED, runs_ahead=False)["launches"]
    assert launches.forward.seconds == pytest.approx(FORWARD)
    assert launches.backward.seconds == pytest.approx(STEP - FORWARD)


def test_beside_a_device_only_what_is_longer_than_the_block_counts() -> None:
    pieces = pieces_of(MEASURED, runs_ahead=True)
    launches = pieces.pop("launches")
    busy = sum(piece.forward.seconds for piece in pieces.values())
    assert 0 < busy < FORWARD
    assert launches.forward.seconds == pytest.approx(FORWARD - busy)
    slow = replace(MEASURED.gemm_cost, alpha_seconds=1.0)
    none = pieces_of(replace(MEASURED, gemm_cost=slow), runs_ahead=True)["launches"]
    assert none.seconds == 0.0


def test_it_is_nothing_where_it_was_not_measured() -> None:
    assert pieces_of(LinearCosts(), runs_ahead=False)["launches"].seconds == 0.0
