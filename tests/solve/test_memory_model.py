"""Memory of a layer, against MPipeMoE's formulas."""

from dataclasses import replace

import pytest

from moetune.domain.constraints import Strategy
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import LayerShape, Workload
from moetune.solve.layer.memory import layer_memory, limit_of
from tests.solve.costs_by_hand import plan_inputs

GPT_XL = LayerShape(d_model=2048, d_hidden=8192, num_experts=64, top_k=1)


def _workload(dtype: str = "float32", **changes: int) -> Workload:
    layer = replace(GPT_XL, top_k=changes.pop("top_k", 1))
    return Workload(
        layer=layer,
        world_size=changes.pop("world_size", 64),
        tokens_per_rank=changes.pop("tokens", 16384),
        dtype=dtype,
    )


def test_memory_of_gpt_xl_is_the_papers_formula() -> None:
    memory = layer_memory(workload=_workload(), degree=4)
    m, h, tokens = 2048, 8192, 16384
    assert memory.state_bytes == 4 * (64 * m + 2 * h * m) * 4
    assert memory.activation_bytes == (4 * tokens * m + tokens * h) * 4
    assert memory.buffer_bytes == memory.activation_bytes
    assert (memory.strategy, memory.saved_bytes, memory.saving_ratio) == ("none", 0, 0.0)


def test_memory_counts_every_choice_and_every_local_expert() -> None:
    workload = _workload(top_k=2, world_size=32)
    memory = layer_memory(workload=workload, degree=1)
    m, h, tokens = 2048, 8192, 16384
    assert memory.state_bytes == 16 * (64 * m + 2 * h * m * 2)
    assert memory.activation_bytes == (2 * tokens * m + 2 * 2 * tokens * m + 2 * tokens * h) * 4
    assert memory.buffer_bytes == (2 * tokens * m + 2 * tokens * h) * 4


@pytest.mark.parametrize(
    ("dtype", "per_parameter", "element"),
    [("float32", 16, 4), ("bfloat16", 16, 2), ("float16", 16, 2), ("float64", 32, 8)],
)
def test_states_take_sixteen_bytes_also_in_mixed_precision(
    dtype: str, per_parameter: int, element: int
) -> None:
    memory = layer_memory(workload=_workload(dtype), degree=1)
    assert memory.state_bytes == per_parameter * (64 * 2048 + 2 * 8192 * 2048)
    assert memory.activation_bytes == element * 16384 * (4 * 2048 + 8192)


def test_swiglu_keeps_two_middles_and_relu_one() -> None:
    gated = replace(_workload(), layer=replace(GPT_XL, activation="swiglu"))
    relu, swiglu = (layer_memory(workload=workload, degree=1) for workload in (_workload(), gated))
    assert swiglu.activation_bytes - relu.activation_bytes == 16384 * 8192 * 4


@pytest.mark.parametrize(("degree", "ratio"), [(4, 0.40), (8, 0.50)])
@pytest.mark.parametrize("strategy", ["S1", "S2", "S3", "S4"])
def test_reuse_saves_of_gpt_xl_what_the_paper_says(
    degree: int, ratio: float, strategy: Strategy
) -> None:
    kept = layer_memory(workload=_workload(), degree=degree)
    memory = layer_memory(workload=_workload(), degree=degree, strategy=strategy)
    m, h, tokens = 2048, 8192, 16384
    delta = tokens * (2 * m * (degree - 2) + h * (degree - 1)) // degree * 4
    assert memory.saved_bytes == 2 * delta == kept.formula_bytes - memory.formula_bytes
    assert memory.saving_ratio == pytest.approx(ratio, abs=5e-3)
    assert memory.activation_bytes == kept.activation_bytes - delta


@pytest.mark.parametrize(("tokens", "degree"), [(41, 1), (41, 3), (7, 2), (5, 5)])
def test_a_rank_of_a_tensor_group_has_room_for_a_row_more_where_rows_do_not_divide(
    tokens: int, degree: int
) -> None:
    layer = LayerShape(d_model=8, d_hidden=24, num_experts=4, top_k=3, activation="relu")
    workload = Workload(layer=layer, world_size=4, tokens_per_rank=tokens, expert_parallel="tensor")
    memory = layer_memory(workload=workload, degree=degree)

    def rows_of_the_busiest(chunk: int) -> int:
        """Deal a chunk's pairs out to the ranks one by one."""
        return max(sum(1 for pair in range(3 * chunk) if pair % 4 == rank) for rank in range(4))

    around = 2 * tokens * 8
    largest = max(len(range(first, tokens, degree)) for first in range(degree))
    kept = around + rows_of_the_busiest(tokens) * 24
    assert memory.activation_bytes == 4 * kept
    rows, sums = rows_of_the_busiest(largest) * (2 * 8 + 2 * 24), largest * 8
    assert memory.buffer_bytes == 4 * (around + rows + sums)


def test_a_layer_may_take_what_the_rest_of_the_model_leaves() -> None:
    taken = {"memory-taken": str(2**30)}
    assert limit_of(plan_inputs(constraints=taken), device_memory_bytes=2**31) == 2**30
    limited = plan_inputs(memory_limit_bytes=2**30 + 5, constraints=taken)
    assert limit_of(limited, device_memory_bytes=2**31) == 5
    for limit in (2**30, 2**29):
        with pytest.raises(InfeasiblePlanError, match=r"takes 1\.00 GiB of .* leaves nothing"):
            limit_of(plan_inputs(constraints=taken), device_memory_bytes=limit)
