"""Commands that spell a request: they ask the same when they are pasted."""

import json
import shlex

import pytest

from moetune.domain.constraints import Bounds, Constraints
from moetune.domain.layer import LayerShape
from moetune.domain.request import PlanRequest
from moetune.domain.routing import BALANCED, NATURAL
from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest
from moetune.huggingface.registry import named_model
from moetune.workflows.commands import layer_command, size_words, training_command
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training import plan_training, training_job
from moetune.workflows.training_plan import TrainingRequest
from tests.cli.running import Cli

TURING, H100 = (
    load_profile_file(bundled_profiles()[name]) for name in ("rtx2080ti-x64", "h100-x8")
)
SHAPE = LayerShape(d_model=256, d_hidden=512, num_experts=64, top_k=2, activation="swiglu")


@pytest.mark.parametrize(
    "request_",
    [
        PlanRequest(model="gpt-s"),
        PlanRequest(model="gpt-s", world_size=64, tokens_per_rank=777, memory_limit_bytes=2**30 + 1,
                    dtype="float32"),
        PlanRequest(layer=SHAPE, tokens_per_rank=4096, num_nodes=16, memory_limit_bytes=8 * 2**30,
                    constraints=Constraints(memory_taken_bytes=2**28, allow_modelled=True)),
        PlanRequest(layer=SHAPE, tokens_per_rank=4096, constraints=Constraints(
            bounds=Bounds(forward_degree=2, strategy="none", order="interleaved"))),
        PlanRequest(model="gpt-s", constraints=Constraints(
            bounds=Bounds(max_degree=4, min_chunk_tokens=16))),
    ],
)  # fmt: skip
def test_a_layers_command_asks_for_its_inputs(cli: Cli, request_: PlanRequest) -> None:
    command = layer_command(request_, profile="rtx2080ti-x64")
    found = cli(*shlex.split(command)[1:], "--allow-modelled", "--json", "--no-save")
    wanted = request_.inputs_for(TURING)
    assert found.code == 0, found.err
    inputs = json.loads(found.out)["inputs"]
    assert inputs["constraints"] == {**wanted.constraints, "allow-modelled": "true"}
    for name in ("model", "world_size", "tokens_per_rank", "dtype", "memory_limit_bytes"):
        assert inputs[name] == getattr(wanted, name)
    assert inputs["layer"]["num_experts"] == wanted.layer.num_experts
    assert inputs["layer"]["activation"] == wanted.layer.activation


@pytest.mark.parametrize(
    ("target", "routing", "pins", "dtype", "optimizer"),
    [
        ("megatron", BALANCED, LayoutRequest(), None, "adam"),
        ("megatron", NATURAL, LayoutRequest(tp=1, recompute=(), zero=1, overlap="none"), "fp8",
         "adam"),
        ("megatron", BALANCED, LayoutRequest(recompute=("moe_act", "norm"), ep=8), None,
         "adam-bf16"),
        ("torchtitan", BALANCED,
         LayoutRequest(pp=2, vpp=1, stages=("E" + "t" * 18, "t" * 18 + "L")), None, "adam"),
    ],
)  # fmt: skip
def test_a_models_command_asks_for_the_same_plan(
    cli: Cli, target: str, routing: object, pins: LayoutRequest, dtype: str | None, optimizer: str
) -> None:
    runtime, model = find_target(target), "qwen3-8b" if target == "torchtitan" else "olmoe"
    job = training_job(
        named_model(model).decoder, world_size=8, global_batch=32, length=2048, dtype=dtype,
        routing=routing, optimizer=optimizer, profile=H100,  # type: ignore[arg-type] # loads
        leaves_room=not pins.ep,
    )  # fmt: skip
    asked = TrainingRequest(job=job, pins=pins, target=runtime, memory_limit_bytes=60 * 10**9)
    command = training_command(asked, model=model, profile="h100-x8")
    found = cli(*shlex.split(command)[1:], "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["id"] == plan_training(asked, H100).id


def test_sizes_are_whole_gibibytes_or_bytes() -> None:
    assert [size_words(one) for one in (2**30, 40 * 2**30, 2**30 + 1, 5)] == [
        "1GiB", "40GiB", "1073741825B", "5B",
    ]  # fmt: skip
