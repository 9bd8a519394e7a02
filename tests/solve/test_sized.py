"""Costs that take one size at a time, as arrays: each answer is the costs' own."""

from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.arrays import array_of
from moetune.domain.costs import Costs, takes_arrays
from moetune.domain.layer import LayerShape, Workload
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.sized import sized
from tests.solve.costs_by_hand import LinearCosts

SIZES = [1.0, 7.0, 4096.0]
WORKLOAD = Workload(
    layer=LayerShape(d_model=64, d_hidden=128, num_experts=8), world_size=4, tokens_per_rank=64
)


def pair() -> tuple[Costs, Costs]:
    alone = LinearCosts(group_size=4)
    many = sized(layer_costs(workload=WORKLOAD, costs=alone)).costs
    assert not takes_arrays(alone)
    assert takes_arrays(many)
    return alone, many


def test_operations_at_many_sizes_are_those_at_each() -> None:
    alone, many = pair()
    found = many.gemm(
        dtype="float32", product="forward", num_experts=2, rows=array_of(np.array(SIZES)),
        d_in=64, d_out=128,
    ).seconds  # fmt: skip
    each = [
        alone.gemm(
            dtype="float32", product="forward", num_experts=2, rows=rows, d_in=64, d_out=128
        ).seconds
        for rows in SIZES
    ]
    assert np.asarray(found).tolist() == pytest.approx(each)


def test_what_has_no_size_is_the_same() -> None:
    alone, many = pair()
    assert many.gemm_line(dtype="float32") == alone.gemm_line(dtype="float32")
    for op in ("all_to_all", "all_reduce"):
        line = alone.collective_line(op=op, group_size=4)
        assert many.collective_line(op=op, group_size=4) == line
    length = {"num_sequences": 1.0, "length": 8, "num_heads": 2, "head_dim": 32}
    assert many.attention(dtype="float32", backward=False, **length) == alone.attention(  # type: ignore[arg-type]
        dtype="float32",
        backward=False,
        **length,  # type: ignore[arg-type]
    )


def test_costs_that_take_arrays_stay_as_they_are() -> None:
    alone, _ = pair()
    layer = sized(layer_costs(workload=WORKLOAD, costs=alone))
    assert sized(layer) is layer
    assert replace(layer, costs=alone) != layer
