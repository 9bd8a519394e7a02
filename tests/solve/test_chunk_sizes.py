"""Sizes of chunks and of their cache, against modules of the real model; states on the host."""

from dataclasses import replace
from typing import Any

import pytest

import moetune
from examples.language_model import LanguageModel
from moetune.domain.chunks import FEWEST_PLACES
from moetune.domain.layer import LayerShape
from moetune.domain.model import WHOLE_MODELS, Transformer
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.training_document import TrainingDocument
from moetune.huggingface.registry import named_model, paper_decoder
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.sharded.units import find_units
from moetune.solve.model.model_chunks import chunks_of, modules_of

WITH_EXPERTS = Transformer(
    moe=LayerShape(d_model=16, d_hidden=32, num_experts=4), num_layers=3, num_heads=2, length=8,
    vocab_size=50,
)  # fmt: skip
DENSE = replace(WITH_EXPERTS, moe=LayerShape(d_model=16, d_hidden=32, num_experts=1), moe_every=0)
GATED = replace(
    WITH_EXPERTS, moe=LayerShape(d_model=16, d_hidden=32, num_experts=4, activation="swiglu"),
    moe_every=1,
)  # fmt: skip
SHARDED = FoldedLayout(dp=8, ep=1, zero=3)
GIB = 2**30


def job_of(model: str, dp: int = 8) -> TrainingJob:
    whole = WHOLE_MODELS.get(model)
    decoder = named_model(model).decoder if whole is None else paper_decoder(model, whole.shape)
    return TrainingJob(decoder=decoder, world_size=dp, global_batch=dp, length=2048)


@pytest.mark.parametrize("shape", [WITH_EXPERTS, DENSE, GATED], ids=["experts", "dense", "swiglu"])
def test_modules_are_as_large_as_what_the_runtime_gathers_at_once(shape: Transformer) -> None:
    layer = shape.moe
    real = LanguageModel(
        shape,
        lambda: MoELayer(
            layer.d_model, layer.d_hidden, layer.num_experts, activation=layer.activation,
            pipeline=False,
        ),
    )  # fmt: skip
    layers = [module for module in real.modules() if isinstance(module, MoELayer)]
    experts = [[*each.experts.parameters()] for each in layers]
    units = find_units(real, {weight for several in experts for weight in several})
    gathered = [[*unit.parameters.values()] for unit in units] + experts
    largest = max(sum(weight.numel() for weight in several) for several in gathered)
    sizes = [
        module.num_parameters for module in modules_of(paper_decoder("real", shape), FoldedLayout())
    ]
    biases = sum(
        weight.numel()
        for name, weight in real.named_parameters()
        if name.rpartition(".")[2].startswith("b")
    )
    assert max(sizes) == pytest.approx(largest, abs=biases)
    assert sum(sizes) == pytest.approx(sum(w.numel() for w in real.parameters()), abs=biases)


@pytest.mark.parametrize("model", ["gpt-2.7b", "ppmoe-6.7b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_a_chunk_holds_the_largest_module_and_the_cache_two_blocks(model: str) -> None:
    job = job_of(model)
    modules, chunks = [*modules_of(job.decoder, SHARDED)], chunks_of(job, SHARDED)
    total = job.decoder.parameters.total
    assert sum(module.num_parameters for module in modules) == pytest.approx(total, rel=0.01)
    assert chunks is not None
    assert chunks.num_parameters == total
    largest = max(2**25, *(2 * module.num_parameters for module in modules))
    assert largest <= chunks.chunk_bytes <= 1.02 * largest
    places, rest = divmod(chunks.cache_bytes, chunks.chunk_bytes)
    assert rest == 0
    assert places >= FEWEST_PLACES
    block = 2 * max(block.parameters.total for block in job.decoder.blocks)
    assert chunks.cache_bytes >= 0.99 * 2 * block  # biases are in no module
    assert (places - 1) * chunks.chunk_bytes < max(2 * block, 2 * chunks.chunk_bytes)


def test_a_rank_has_its_experts_alone_in_a_module() -> None:
    decoder = paper_decoder("x", WITH_EXPERTS)
    whole, shared = (
        sum(module.num_parameters for module in modules_of(decoder, FoldedLayout(dp=8, ep=ep)))
        for ep in (1, 4)
    )
    experts = sum(
        block.routed.num_experts * block.routed.expert_parameters
        for block in decoder.blocks if block.routed is not None
    )  # fmt: skip
    assert whole - shared == pytest.approx(0.75 * experts)


@pytest.mark.parametrize("changes", [{"zero": 1}, {"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_only_shards_of_single_ranks_have_chunks(changes: dict[str, Any]) -> None:
    assert chunks_of(job_of("gpt-2.7b"), replace(SHARDED, **changes)) is None


def plan(**asked: Any) -> TrainingDocument:
    view: Any = moetune.plan("gpt-2.7b", profile="a100-x4", save=False, **asked)
    document = view.plan
    assert isinstance(document, TrainingDocument)
    return document


def test_states_that_fit_nowhere_else_are_on_the_host() -> None:
    parameters = job_of("gpt-2.7b").decoder.parameters.total
    roomy = plan(world_size=1)
    tight = plan(world_size=1, memory_limit="40GiB")
    assert roomy.chunks is None
    assert roomy.layout.offload_optimizer == 0
    assert tight.chunks is not None
    assert tight.chunks.offload
    assert tight.fits
    assert (tight.layout.zero, tight.layout.offload_optimizer) == (3, 1.0)
    assert tight.memory.peak_bytes <= 40 * GIB < 18 * parameters
    assert tight.memory.host_bytes == pytest.approx(18 * parameters, rel=0.01)
    states = [tight.memory.parts[name] for name in ("parameters", "gradients", "optimizer")]
    assert states == [0, 0, 0]
    computed = sum(roomy.predicted.parts.values()) - roomy.predicted.parts["optimizer"]
    assert tight.predicted.step_seconds > computed
    assert sum(tight.predicted.parts.values()) == pytest.approx(tight.predicted.step_seconds)


def test_slower_copies_make_a_longer_step() -> None:
    asked: dict[str, Any] = {"world_size": 1, "memory_limit": "40GiB", "micro_batch": 1}
    first = plan(**asked)
    batches = 8
    shard = 2 * job_of("gpt-2.7b").decoder.parameters.total
    seconds = 2 * shard * 3.17383e-11 * batches  # two fetches of all parameters
    assert first.predicted.parts["gradients"] > 0
    assert first.predicted.parts["gradients"] + first.predicted.parts["mlp"] > seconds / 2


def test_pins_that_exclude_the_host_leave_nothing_that_fits() -> None:
    with pytest.raises(moetune.MoetuneError, match="memory binds"):
        plan(world_size=1, memory_limit="40GiB", zero=1)
