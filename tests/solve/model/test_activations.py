"""Activations of a block against the tensors that autograd saves in a torch model of it."""

from dataclasses import replace

import pytest

from moetune.domain.architecture import Block
from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts, Router
from moetune.domain.training import FoldedLayout, Recompute, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.model.activations import block_modules
from tests.solve.model.saved_tensors import Attention, Ffn, TorchBlock

TOKENS, WIDTH = 64, 128
HEADS = GroupedQueryAttention(
    d_model=WIDTH, num_heads=8, num_kv_heads=8, head_dim=32, v_head_dim=32
)
GROUPED = replace(HEADS, num_kv_heads=2)
NORMED = replace(GROUPED, norm_parameters=64)
LATENT = LatentAttention(
    d_model=WIDTH, num_heads=8, q_rank=48, kv_rank=32, nope_dim=32, rope_dim=16, v_head_dim=32
)
DENSE = DenseFfn(d_model=WIDTH, d_hidden=256)
ROUTED = RoutedExperts(
    d_model=WIDTH, num_experts=8, top_k=2, d_hidden=192,
    router=Router(score="softmax", parameters=8 * WIDTH),
)  # fmt: skip
SHARED = replace(ROUTED, shared=DenseFfn(d_model=WIDTH, d_hidden=96))


def ours(attention: Attention, ffn: Ffn, recompute: tuple[Recompute, ...]) -> float:
    decoder = replace(named_model("qwen3-30b-a3b").decoder, d_model=WIDTH)
    job = TrainingJob(decoder=decoder, world_size=1, global_batch=1, length=TOKENS)
    block = Block(parts=(attention, ffn), norms=2 * WIDTH)
    return sum(block_modules(block, job, FoldedLayout(recompute=recompute)).values())


CASES: list[tuple[Attention, Ffn, tuple[Recompute, ...]]] = [
    (HEADS, DENSE, ()),
    (GROUPED, DENSE, ()),
    (NORMED, DENSE, ()),
    (LATENT, DENSE, ()),
    (GROUPED, ROUTED, ()),
    (NORMED, SHARED, ()),
    (LATENT, SHARED, ()),
    (NORMED, SHARED, ("core_attn",)),
    (NORMED, SHARED, ("norm",)),
    (NORMED, SHARED, ("moe_act",)),
    (NORMED, SHARED, ("norm", "moe_act")),
    (NORMED, SHARED, ("shared_experts",)),
    (NORMED, SHARED, ("moe",)),
    (NORMED, DENSE, ("mlp",)),
    (NORMED, DENSE, ("norm",)),
    (LATENT, SHARED, ("mla_up_proj",)),
    (LATENT, DENSE, ("mla_up_proj", "norm")),
    (LATENT, SHARED, ("full",)),
]


@pytest.mark.parametrize(
    ("attention", "ffn", "recompute"), CASES,
    ids=lambda value: ",".join(value) or "none" if isinstance(value, tuple) else None,
)  # fmt: skip
def test_activations_are_those_that_autograd_saves(
    attention: Attention, ffn: Ffn, recompute: tuple[Recompute, ...]
) -> None:
    saved = TorchBlock(attention, ffn, recompute).saved_bytes(TOKENS)
    # The scales of norms, the weights of rows and one of the router's maps are under 3 %.
    assert ours(attention, ffn, recompute) == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("module", ["norm", "moe_act", "shared_experts", "moe", "mla_up_proj"])
def test_what_a_module_saves_is_what_its_recomputation_frees(module: Recompute) -> None:
    attention = LATENT if module == "mla_up_proj" else NORMED
    whole = TorchBlock(attention, SHARED, ()).saved_bytes(TOKENS)
    rest = TorchBlock(attention, SHARED, (module,)).saved_bytes(TOKENS)
    freed = ours(attention, SHARED, ()) - ours(attention, SHARED, (module,))
    assert freed == pytest.approx(whole - rest, rel=0.03)
