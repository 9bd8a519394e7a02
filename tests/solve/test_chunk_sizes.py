"""Sizes of chunks and of their cache, against the real model and all sizes; states on the host."""

from dataclasses import replace
from typing import Any

import pytest

import moetune
from examples.language_model import LanguageModel
from moetune.domain.chunks import FEWEST_PLACES, pack
from moetune.domain.layer import LayerShape
from moetune.domain.model import WHOLE_MODELS, Transformer, paper_decoder
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.training_document import TrainingDocument
from moetune.huggingface.registry import named_model
from moetune.runtime.moe.layer import MoELayer
from moetune.solve.model.model_chunks import cache_places, chunks_of, modules_of

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
def test_no_parameter_of_the_real_model_is_larger_than_the_largest(shape: Transformer) -> None:
    layer = shape.moe
    real = LanguageModel(
        shape,
        lambda: MoELayer(
            layer.d_model, layer.d_hidden, layer.num_experts, activation=layer.activation,
            pipeline=False,
        ),
    )  # fmt: skip
    modules = modules_of(paper_decoder("real", shape), FoldedLayout(), dtype="float32")
    sizes = [one.num_elements for module in modules for one in module.parameters]
    assert max(one.numel() for one in real.parameters()) <= max(sizes)
    biases = sum(
        one.numel()
        for name, one in real.named_parameters()
        if name.rpartition(".")[2].startswith("b")
    )
    assert sum(sizes) == pytest.approx(sum(one.numel() for one in real.parameters()), abs=biases)


@pytest.mark.parametrize("model", ["gpt-2.7b", "ppmoe-6.7b", "mixtral-8x7b", "deepseek-v2-lite"])
def test_all_parameters_of_a_model_are_packed(model: str) -> None:
    job = job_of(model)
    modules = modules_of(job.decoder, SHARDED, dtype="bfloat16")
    sizes = sum(one.num_elements for module in modules for one in module.parameters)
    assert sizes == pytest.approx(job.decoder.parameters.total, rel=0.01)
    chunks = chunks_of(job, SHARDED)
    assert chunks is not None
    assert chunks.num_parameters == job.decoder.parameters.total


@pytest.mark.parametrize("model", ["gpt-2.7b", "ppmoe-6.7b"])
def test_chunks_waste_the_least_of_all_sizes_up_to_twice_the_smallest(model: str) -> None:
    job = job_of(model)
    chunks = chunks_of(job, SHARDED)
    assert chunks is not None
    modules = modules_of(job.decoder, SHARDED, dtype="bfloat16")
    every = [one for module in modules for one in module.parameters]
    low = max(2**25, 2 * max(one.num_elements for one in every))

    def wasted(size: int) -> int:
        packed = [one for one in pack(every, chunk_bytes=size) if not one.is_fused]
        used = sum(2 * slot.num_elements for one in packed for slot in one.slots)
        return len(packed) * size - used

    assert low <= chunks.chunk_bytes <= 2 * low + 2**10
    other = [wasted(low + low * step // 7) for step in range(8)]
    assert wasted(chunks.chunk_bytes) <= min(other) * 1.02 + 2**20


def test_the_cache_has_two_blocks_and_all_of_any_module() -> None:
    job = job_of("gpt-2.7b")
    chunks = chunks_of(job, SHARDED)
    assert chunks is not None
    places = chunks.cache_bytes // chunks.chunk_bytes
    assert places >= FEWEST_PLACES
    block = 2 * job.decoder.blocks[0].parameters.total
    assert (places - 1) * chunks.chunk_bytes < max(2 * block, 2 * chunks.chunk_bytes)
    assert places * chunks.chunk_bytes >= 2 * block
    modules = modules_of(paper_decoder("x", WITH_EXPERTS), SHARDED, dtype="bfloat16")
    apart = pack([one for module in modules for one in module.parameters], chunk_bytes=4096)
    sizes = {slot.name: number for number, one in enumerate(apart) for slot in one.slots}
    at_once = max(len({sizes[one.name] for one in module.parameters}) for module in modules)
    assert cache_places(modules, apart, chunk_bytes=2**30) == max(FEWEST_PLACES, at_once)


def test_experts_are_shared_by_their_replicas_alone() -> None:
    modules = modules_of(
        paper_decoder("x", WITH_EXPERTS), FoldedLayout(dp=8, ep=4, zero=3), dtype="float32"
    )
    ranks = {one.name: one.group.ranks for module in modules for one in module.parameters}
    assert ranks["1.experts.0"] == 2
    assert ranks["1.experts.router.0"] == ranks["0.0.0"] == 8


@pytest.mark.parametrize("changes", [{"zero": 1}, {"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_only_shards_of_single_ranks_have_chunks(changes: dict[str, Any]) -> None:
    assert chunks_of(job_of("gpt-2.7b"), replace(SHARDED, **changes)) is None


def plan(**asked: Any) -> TrainingDocument:
    view: Any = moetune.plan("gpt-2.7b", profile="a100-x4", save=False, **asked)
    found = view.plan
    assert isinstance(found, TrainingDocument)
    return found


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
