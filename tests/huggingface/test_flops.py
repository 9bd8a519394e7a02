"""FLOPs of a token against published runs: their TFLOP/s divided by their tokens/s."""

import pytest

from moetune.domain.attention import mean_context
from moetune.huggingface.registry import named_model
from tests.huggingface.configs import DEEPSEEK, NEMOTRON, QWEN3, decoder

PUBLISHED = {"qwen3-30b-a3b": 23.0, "qwen3-235b-a22b": 148.0, "deepseek-v3": 260.0,
             "kimi-k2": 204.5, "deepseek-v4-flash": 90.9, "gpt-oss-120b": 32.64}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_are_within_a_percent_of_published_runs_at_4096_tokens(name: str) -> None:
    flops = named_model(name).decoder.flops_per_token(4096).total / 1e9
    assert flops == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize(("length", "window"), [(64, 8), (64, 64), (100, 99), (64, 1)])
def test_mean_context_counts_the_keys_of_every_token(length: int, window: int) -> None:
    """A window's mean is exact; a full causal mask counts half, as Megatron-LM does."""
    exact = sum(min(place + 1, window) for place in range(length)) / length  # keys of each token
    assert mean_context(length, window) == pytest.approx(exact, abs=0.5 if window == length else 0)
    assert mean_context(length) == length / 2


def test_attention_grows_with_the_sequence_and_the_rest_does_not() -> None:
    model = decoder(QWEN3)
    short, long = (model.flops_per_token(length) for length in (1024, 2048))
    per_key = 6 * 4 * 8 * 16 * 2  # forward and backward, blocks, heads, width, QK and PV
    assert long.attention - short.attention == per_key * 512
    assert long.routed == short.routed == 6 * 4 * 2 * 3 * 64 * 32
    assert long.head == short.head == 6 * 64 * 100


def test_a_window_bounds_attention() -> None:
    windowed = decoder(QWEN3, use_sliding_window=True, sliding_window=16, max_window_layers=2)
    added = 6 * 2 * 8 * 16 * 2 * (mean_context(2048) - mean_context(2048, 16))
    plain = decoder(QWEN3).flops_per_token(2048).attention
    assert plain - windowed.flops_per_token(2048).attention == pytest.approx(added)


def test_multi_token_prediction_adds_a_block_a_projection_and_logits() -> None:
    plain = decoder(DEEPSEEK)
    more = decoder(DEEPSEEK, num_nextn_predict_layers=2)
    block = plain.blocks[-1].flops_per_token(512).total
    added = 2 * (block + 6 * (2 * 64 * 64 + 64 * 100))
    total = plain.flops_per_token(512).total
    assert more.flops_per_token(512).total == pytest.approx(total + added)
    assert more.parameters == plain.parameters
    norms = 2 * 64 + 3 * 64
    expected = 2 * (plain.blocks[-1].parameters.total - 2 * 64 + 2 * 64 * 64 + norms)
    assert more.prediction_parameters == expected


def test_experts_on_a_latent_width_without_a_gate_cost_two_small_gemms() -> None:
    block = decoder(NEMOTRON).blocks[1]
    projections, experts = 2 * 64 * 16, 2 * 2 * 16 * 32
    assert block.forward_macs(512).routed == projections + experts
    assert block.forward_macs(512).shared == 2 * 64 * 48
    assert block.parameters.routed == projections + 8 * 2 * 16 * 32


def test_zero_experts_cost_nothing() -> None:
    longcat = {**DEEPSEEK, "model_type": "longcat_flash", "num_layers": 2, "ffn_hidden_size": 96,
               "expert_ffn_hidden_size": 32, "moe_topk": 4, "zero_expert_num": 8}  # fmt: skip
    dropped = ("num_hidden_layers", "n_shared_experts", "num_experts_per_tok", "n_group",
               "moe_intermediate_size", "intermediate_size", "first_k_dense_replace",
               "topk_group")  # fmt: skip
    model = decoder(longcat, **dict.fromkeys(dropped, ...))
    block = model.blocks[0]
    assert block.forward_macs(512).routed == 4 / 2 * 3 * 64 * 32
    assert block.parameters.routed == 8 * 3 * 64 * 32
    assert block.parameters.router == 16 * 64
    assert block.parameters.dense == 2 * 3 * 64 * 96
    assert block.active_parameters.routed == 2 * 3 * 64 * 32
