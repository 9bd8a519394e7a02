"""Plans of experts in 8 bits: what their chunks cost, what they keep, and what they refuse."""

from dataclasses import replace

import pytest

from moetune.domain.constraint_texts import encode_constraints
from moetune.domain.constraints import Bounds, Constraints
from moetune.domain.costs import LinearCost
from moetune.domain.errors import ProfileError
from moetune.domain.layer import Activation, LayerShape, Workload
from moetune.domain.plan import Plan, plan_from_json
from moetune.domain.request import PlanRequest
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.doubts import PROFILE, profile_command
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.plan import solve_plan
from moetune.workflows.files import plan_to_json
from tests.solve.costs_by_hand import LinearCosts, plan_inputs

ROWS, D_MODEL, D_HIDDEN = 512.0, 64, 256
ROUNDING = {"quantize": 1e-9, "quantize_matrix": 2e-9, "quantize_wire": 4e-9}
MEASURED = LinearCosts(rows_seconds=ROUNDING)


def workload_of(recipe: str, activation: Activation = "relu", world_size: int = 2) -> Workload:
    layer = LayerShape(d_model=D_MODEL, d_hidden=D_HIDDEN, num_experts=4, activation=activation)
    return Workload(
        layer=layer, world_size=world_size, tokens_per_rank=1024, dtype="bfloat16",
        quantization=recipe,
    )  # fmt: skip


def costs_of(recipe: str, activation: Activation = "relu", world_size: int = 2) -> LayerCosts:
    return layer_costs(workload=workload_of(recipe, activation, world_size), costs=MEASURED)


@pytest.mark.parametrize(
    ("activation", "forward", "backward"),
    [("relu", D_MODEL + D_HIDDEN, D_MODEL + D_HIDDEN),
     ("swiglu", D_MODEL + D_HIDDEN, D_MODEL + 2 * D_HIDDEN)],
)  # fmt: skip
def test_a_chunk_rounds_each_of_its_tensors_once(
    activation: Activation, forward: int, backward: int
) -> None:
    plain, rounded = costs_of("", activation), costs_of("mxfp8", activation)
    grads = sum(one.seconds for one in plain.products("grad_weight", ROWS))
    for phase, values, later in (("forward", forward, 0.0), ("backward", backward, grads)):
        found = rounded.compute(phase=phase, rows=ROWS).seconds  # type: ignore[arg-type]
        known = plain.compute(phase=phase, rows=ROWS).seconds  # type: ignore[arg-type]
        assert found - known + later == pytest.approx(ROWS * values * ROUNDING["quantize"])


@pytest.mark.parametrize(("activation", "matrices"), [("relu", 2), ("swiglu", 3)])
def test_matrices_are_rounded_once_a_phase(activation: Activation, matrices: int) -> None:
    plain, rounded = costs_of("", activation), costs_of("fp8_rowwise", activation)
    seconds = 2 * matrices * D_MODEL * D_HIDDEN * ROUNDING["quantize_matrix"]
    grads = sum(one.seconds for one in plain.products("grad_weight", 1024.0))
    for phase, more in (("forward", 0.0), ("backward", grads)):
        found = rounded.phase_overhead(phase, tokens=1024).seconds  # type: ignore[arg-type]
        known = plain.phase_overhead(phase, tokens=1024).seconds  # type: ignore[arg-type]
        assert found - known == pytest.approx(seconds + more)


def test_a_format_of_the_wire_halves_the_dispatch_and_packs_the_rows() -> None:
    plain, packed = costs_of(""), costs_of("dispatch=fp8_rowwise")
    assert plain.bytes_per_row == 2 * D_MODEL
    # A dispatched row has 64 bytes and its scale in 16; a combined one has 128.
    assert packed.bytes_per_row == (D_MODEL + 16 + 2 * D_MODEL) / 2
    found = packed.compute(phase="forward", rows=ROWS).seconds
    known = plain.compute(phase="forward", rows=ROWS).seconds
    assert found - known == pytest.approx(ROWS * D_MODEL * ROUNDING["quantize_wire"])
    overhead = [one.phase_overhead("forward", tokens=1024).seconds for one in (plain, packed)]
    assert overhead[0] == overhead[1]
    alone = costs_of("dispatch=fp8_rowwise", world_size=1)
    assert alone.compute(phase="forward", rows=ROWS) == costs_of("", world_size=1).compute(
        phase="forward", rows=ROWS
    )


def test_products_are_looked_up_by_their_format() -> None:
    costs = costs_of("mxfp8+emulate")
    assert costs.product_dtype("forward") == "mxfp8_emulated"
    assert costs.product_dtype("grad_weight") == "bfloat16"
    assert costs_of("").product_dtype("forward") == "bfloat16"
    assert costs_of("fp8_rowwise").lines("forward") is None
    assert costs.key.quantization == "mxfp8+emulate"


@pytest.mark.parametrize("lacks", ROUNDING)
def test_what_was_not_measured_is_refused_with_the_command_that_measures_it(lacks: str) -> None:
    known = {op: seconds for op, seconds in ROUNDING.items() if op != lacks}
    recipe = "fp8_rowwise+dispatch=fp8_rowwise"
    costs = layer_costs(workload=workload_of(recipe), costs=LinearCosts(rows_seconds=known))
    is_once = lacks == "quantize_matrix"
    with pytest.raises(ProfileError, match=f"no {lacks} in fp8_rowwise") as caught:
        costs.overhead(tokens=1024) if is_once else costs.compute(phase="forward", rows=ROWS)
    assert f"moetune profile --quantization {recipe}" in caught.value.hint


def solve(recipe: str, limit_bytes: int | None = None) -> Plan:
    layer = LayerShape(d_model=1024, d_hidden=4096, num_experts=16, top_k=2)
    constraints = encode_constraints(Constraints(quantization=recipe))
    costs = replace(MEASURED, transfer_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=2e-10))
    return solve_plan(
        inputs=plan_inputs(
            layer=layer, constraints=constraints, memory_limit_bytes=limit_bytes
        ),
        costs=costs, resamples=(costs,), bounds=Bounds(), device_memory_bytes=80 * 2**30,
        provenance="measured",
    ).plan  # fmt: skip


def test_a_plan_names_its_recipe_and_keeps_everything() -> None:
    plan = solve("fp8_rowwise")
    assert plan.memory.strategy == "none"
    assert plan.workload.quantization == "fp8_rowwise"
    assert plan.inputs.constraints == {"quantization": "fp8_rowwise"}
    assert plan.id != solve("").id
    assert plan_from_json(plan_to_json(plan), "plan").workload == plan.workload
    assert plan.predicted.step_seconds > solve("").predicted.step_seconds  # rounding is not free
    assert "--quantization fp8_rowwise" in profile_command(plan.inputs, PROFILE)
    assert "--quantization" not in profile_command(solve("").inputs, PROFILE)


def test_a_layer_of_a_named_model_is_profiled_by_the_models_name() -> None:
    inputs = replace(plan_inputs(), model="gpt-xl")
    assert profile_command(inputs, "moetune profile --nproc 8") == (
        "moetune profile --nproc 8 --name by-hand --resume --model gpt-xl --tokens 4096 "
        "--dtype bfloat16"
    )


def test_a_request_in_8_bits_is_in_bfloat16() -> None:
    workload = workload_of("mxfp8")
    request = PlanRequest(
        layer=workload.layer, tokens_per_rank=8, constraints=Constraints(quantization="mxfp8")
    )
    assert request.constraints.quantization == "mxfp8"


@pytest.mark.parametrize(
    ("recipe", "scales"),
    [
        ("fp8_rowwise", 2 * (D_HIDDEN + D_MODEL)),
        ("mxfp8", 2 * 2 * D_MODEL * D_HIDDEN // 32),
        ("forward=fp8_rowwise", 2 * (D_HIDDEN + D_MODEL)),
    ],
)
def test_the_peak_has_the_rounded_matrices_of_a_phase(recipe: str, scales: int) -> None:
    sizes = {"forward_degree": 2, "backward_degree": 2, "is_grouped": True}
    plain = peak_bytes(workload=workload_of(""), **sizes)  # type: ignore[arg-type]
    found = peak_bytes(workload=workload_of(recipe), **sizes)  # type: ignore[arg-type]
    values = 2 * 2 * D_MODEL * D_HIDDEN
    assert found.buffer_bytes - plain.buffer_bytes == values + 4 * scales
    only = peak_bytes(workload=workload_of("grad_weights=fp8_rowwise"), **sizes)  # type: ignore[arg-type]
    wire = peak_bytes(workload=workload_of("dispatch=mxfp8"), **sizes)  # type: ignore[arg-type]
    assert only.buffer_bytes == plain.buffer_bytes
    assert wire == plain
