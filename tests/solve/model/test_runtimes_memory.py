"""Memory as each runtime keeps it, against torch itself and counts by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks.public_runs.score import allocated_bytes, reserved_bytes
from moetune.domain.routing import NATURAL
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, TrainingDtype, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.model.activations import block_modules, exchange_bytes
from moetune.solve.model.memory import ROUTING, MemoryModel, RankMemory
from moetune.solve.model.pipeline import DecoderStages

QWEN = named_model("qwen3-30b-a3b").decoder
JOB = TrainingJob(decoder=QWEN, world_size=8, global_batch=64, length=4096)
LAYOUT = FoldedLayout(dp=8, ep=8)


def memory_of(name: str, layout: FoldedLayout, job: TrainingJob = JOB) -> RankMemory:
    stages = DecoderStages(job.decoder)
    return MemoryModel(job=job, stages=stages, target=find_target(name)).peak(layout)


class Living(TorchDispatchMode):
    """The most bytes that live at once of the storages that operations make."""

    most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:  # of torch
        outs = func(*args, **(kwargs or {}))
        seen: dict[int, tuple[StorageWeakRef, int]] = self.__dict__.setdefault("seen", {})
        for leaf in tree_leaves(outs):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                ref = StorageWeakRef(storage)
                seen[ref.cdata] = ref, storage.nbytes()
        alive = (size for ref, size in seen.values() if not ref.expired())
        self.most = max(self.most, sum(alive))
        return outs


def test_torchs_loss_takes_fourteen_bytes_a_logit() -> None:
    """Logits in bfloat16, log-probabilities, their gradient and that of the float32 logits."""
    tokens, vocab = 64, 4096
    hidden = torch.randn(tokens, 8, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(8, vocab, dtype=torch.bfloat16)
    labels = torch.randint(vocab, (tokens,))
    with Living() as living:  # type: ignore[no-untyped-call] # of torch
        logits = hidden @ head
        torch.nn.functional.cross_entropy(logits.float(), labels).backward()
    each = living.most / (tokens * vocab)
    assert find_target("torchtitan").logit_bytes == pytest.approx(each, rel=0.05)


def test_torchtitan_has_the_logits_of_an_eighth_of_the_tokens() -> None:
    layout = replace(LAYOUT, zero=3)
    titan, whole = (memory_of(name, layout).parts["logits"] for name in ("torchtitan", "deepspeed"))
    assert titan == pytest.approx(whole / 8)
    assert whole == 14 * 4096 * QWEN.vocab_size


@pytest.mark.parametrize(
    ("name", "zero", "parameters", "gradients", "states"),
    [
        ("torchtitan", 3, 4 / 8, 4 / 8, 8 / 8), ("torchtitan", 2, 2 + 4 / 8, 4 / 8, 8 / 8),
        ("transformers", 3, 4 / 8, 4 / 8, 8 / 8), ("deepspeed", 1, 2, 2, 12 / 8),
        ("deepspeed", 3, 2 / 8, 2 / 8, 12 / 8), ("megatron", 1, 2, 4, 12 / 8),
    ],
)  # fmt: skip
def test_a_parameter_takes_the_bytes_of_its_runtime(
    name: str, zero: int, parameters: float, gradients: float, states: float
) -> None:
    dense = named_model("llama-3-8b").decoder
    job = replace(JOB, decoder=dense)
    layout = FoldedLayout(dp=8, zero=zero)  # type: ignore[arg-type] # of the parameters
    parts = memory_of(name, layout, job).parts
    count = dense.parameters.total
    for part, each in zip(
        ("parameters", "gradients", "optimizer"), (parameters, gradients, states), strict=True
    ):
        assert parts[part] == pytest.approx(each * count, rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "each"), [("fp8", 1.0), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)]
)
def test_narrow_gemms_keep_their_inputs_narrow(dtype: TrainingDtype, each: float) -> None:
    block = QWEN.blocks[0]
    wide = block_modules(block, JOB, LAYOUT)
    narrow = block_modules(block, replace(JOB, dtype=dtype), LAYOUT)
    rows, part = 4096 * 8, block.routed
    assert part is not None
    saved = (2 - each) * rows * (part.d_expert + part.d_hidden)
    assert wide["experts"] - narrow["experts"] == pytest.approx(saved)
    assert narrow["inputs"] == wide["inputs"]
    assert narrow["attention"] > wide["attention"]  # its result is kept in both formats


def test_weights_in_eight_bits_wait_next_to_the_parameters() -> None:
    wide, narrow = (
        memory_of("megatron", LAYOUT, replace(JOB, dtype=dtype)).parts["parameters"]
        for dtype in ("bfloat16", "fp8")
    )
    assert narrow == 2 * wide


@pytest.mark.parametrize("name", ["transformers", "deepspeed"])
def test_heads_that_gather_their_logits_have_all_of_them(name: str) -> None:
    layout = replace(LAYOUT, dp=4, tp=2)
    whole = 14 * layout.micro_batch * JOB.length * QWEN.vocab_size
    assert memory_of(name, layout).parts["logits"] == pytest.approx(whole, rel=0.01)


@pytest.mark.parametrize(("name", "extra"), [("megatron", 2), ("torchtitan", 1)])
def test_plain_activations_keep_their_factors(name: str, extra: int) -> None:
    """Of SwiGLU in plain torch: the gate's result, and the product where rows are weighted."""
    rows, width = 32, 64
    up = torch.randn(rows, 2 * width, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(rows, 1, requires_grad=True)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gate, linear = up.chunk(2, dim=-1)
        product = torch.nn.functional.silu(gate) * linear
        if extra == 2:  # rows are weighted before the down-projection
            product = product * weights
    sizes = [size for size in saved.values() if size > weights.nbytes]
    beyond = sum(sizes) - up.nbytes
    assert beyond == extra * rows * width * 2
    target = replace(find_target(name), fuses_activations=False)
    fused = replace(target, fuses_activations=True)
    block, part = QWEN.blocks[0], QWEN.blocks[0].routed
    assert part is not None
    plain, single = (block_modules(block, JOB, LAYOUT, each)["experts"] for each in (target, fused))
    assert plain - single == pytest.approx(extra * 4096 * part.top_k * part.d_hidden * 2)


def test_hybrid_ep_has_buffers_of_all_its_ranks_rows() -> None:
    layout = replace(LAYOUT, dispatcher="hybrid_ep")
    rows = 8 * 4096
    assert exchange_bytes(JOB, layout) == 2 * rows * (2 * 2048 + 4 * 128)
    assert exchange_bytes(JOB, LAYOUT) == 0.0
    with_buffers = memory_of("megatron", layout).parts["libraries"]
    assert with_buffers - memory_of("megatron", LAYOUT).parts["libraries"] == 2 * rows * 4608


def test_room_for_natural_routing_is_a_separate_part() -> None:
    plain = memory_of("megatron", LAYOUT)
    roomy = memory_of("megatron", LAYOUT, replace(JOB, leaves_room=True))
    natural = memory_of("megatron", LAYOUT, replace(JOB, routing=NATURAL))
    assert plain.parts["uneven routing"] == 0
    assert roomy.peak_bytes - roomy.parts[ROUTING] == pytest.approx(plain.peak_bytes)
    assert allocated_bytes(roomy) == allocated_bytes(plain)
    rows = ("activations", "workspace")
    grown = sum(natural.parts[row] - plain.parts[row] for row in rows)
    assert roomy.parts["uneven routing"] == pytest.approx(grown)
    assert grown > 0


def test_a_rank_is_not_the_fullest_in_every_layer() -> None:
    """Of 48 layers' rows the fullest rank has beyond the mean what it has of one over √48."""
    part = QWEN.blocks[0].routed
    assert part is not None
    natural = replace(JOB, routing=NATURAL)
    skew = natural.skew(part, 8).p99
    even, fuller = (memory_of("megatron", LAYOUT, job).activations for job in (JOB, natural))
    assert fuller["experts"] / even["experts"] == pytest.approx(1 + (skew - 1) / 48**0.5)
    assert fuller["attention"] == even["attention"]


def test_blocks_of_predictions_keep_activations_and_have_logits() -> None:
    decoder = named_model("deepseek-v3").decoder
    job = replace(JOB, decoder=decoder)
    without = replace(job, decoder=replace(decoder, predictions=()))
    layout = FoldedLayout(dp=8, ep=8, recompute=("full",))
    more, less = (memory_of("megatron", layout, asked) for asked in (job, without))
    assert more.parts["logits"] == 2 * less.parts["logits"]
    kept = 2 * 4096 * decoder.d_model
    assert more.parts["activations"] - less.parts["activations"] == pytest.approx(kept)


def test_a_graph_of_the_whole_step_reserves_more() -> None:
    plain = memory_of("megatron", LAYOUT)
    full = memory_of("megatron", replace(LAYOUT, cuda_graphs="full"))
    assert allocated_bytes(full) == allocated_bytes(plain)
    assert reserved_bytes(full) == pytest.approx(1.23 / 1.03 * reserved_bytes(plain))


def saved_by_policy(widths: list[tuple[int, int]], tokens: int) -> int:
    """Return the bytes that every second matrix product saves under torch's own checkpointing.

    Args:
        widths: inputs and outputs of the block's products, in their order.
    """
    saved: list[int] = []

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del context, kwargs
        if func != torch.ops.aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        left, right = args
        is_saved = len(saved) % 2 == 0
        saved.append(left.shape[0] * right.shape[1] * left.itemsize if is_saved else 0)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    caching, _ = create_selective_checkpoint_contexts(policy)
    with caching:
        for inputs, outputs in widths:
            x = torch.zeros(tokens, inputs, dtype=torch.bfloat16, device="meta")
            x @ torch.zeros(inputs, outputs, dtype=torch.bfloat16, device="meta")
    assert len(saved) == len(widths)
    return sum(saved)


def test_selective_recomputation_keeps_what_torchs_policy_saves() -> None:
    dense = named_model("llama-3-8b").decoder
    block, tokens = dense.blocks[0], 8
    job = replace(JOB, decoder=dense, length=tokens)
    modules = block_modules(block, job, FoldedLayout(recompute=("selective",)))
    width, keys, hidden = 4096, 1024, 14336
    products = [
        (width, width), (width, keys), (width, keys), (width, width),
        (width, hidden), (width, hidden), (hidden, width),
    ]  # fmt: skip
    attention = tokens * (2 * width + 4 * 32)
    wanted = saved_by_policy(products, tokens) + attention + 2 * tokens * width
    assert sum(modules.values()) == wanted


def test_latent_attention_and_tensor_ranks_keep_theirs_under_selective_recomputation() -> None:
    decoder = named_model("deepseek-v3").decoder
    job = replace(JOB, decoder=decoder, length=64)
    whole, half = (
        block_modules(decoder.blocks[0], job, FoldedLayout(tp=tp, recompute=("selective",)))
        for tp in (1, 2)
    )
    latent, heads, width = (1536, 512 + 64), 128, 7168
    # Products of q_a, q_b, kv_a, kv_b, o: the first, third and fifth are kept, then w3's.
    kept = 2 * (sum(latent) + width) + 2 * heads * 128 + 4 * heads
    assert whole["latent attention"] == 64 * kept
    assert whole["mlp"] == 64 * 2 * 18432
    reduced = 2 * 32 * width
    assert half["mlp"] == whole["mlp"] / 2 + reduced
    assert half["latent attention"] == whole["latent attention"] / 2 + reduced


def test_blocks_have_at_least_what_even_rows_keep() -> None:
    layout, plain = FoldedLayout(dp=8, ep=8), JOB
    natural, even = (
        MemoryModel(job=job, stages=DecoderStages(QWEN), target=find_target("megatron"))
        for job in (replace(plain, routing=NATURAL, leaves_room=True), plain)
    )
    assert natural.sizes_of_blocks(layout, [()]) == even.sizes_of_blocks(layout, [()])
