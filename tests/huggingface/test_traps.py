"""Traps of configurations: spellings, nesting, counts against widths, and blocks that differ."""

from moetune.domain.experts import RoutedExperts
from moetune.huggingface.registry import named_model
from tests.huggingface.configs import DEEPSEEK, NEMOTRON, QWEN3, decoder


def _experts(model: object, at: int = -1) -> RoutedExperts:
    routed = model.blocks[at].routed  # type: ignore[attr-defined]
    assert isinstance(routed, RoutedExperts)
    return routed


def test_a_vision_language_model_is_read_from_its_text_config() -> None:
    inner = {key: value for key, value in QWEN3.items() if key != "tie_word_embeddings"}
    nested = {
        "model_type": "qwen3_vl_moe", "text_config": {**inner, "model_type": "qwen3_vl_moe_text"},
        "vision_config": {"hidden_size": 1152, "depth": 27}, "tie_word_embeddings": True,
    }  # fmt: skip
    read = decoder(nested)
    assert read.blocks == decoder(QWEN3).blocks
    assert read.is_tied  # as the outer configuration says
    assert read.parameters.head == 0
    deeper = {"model_type": "qwen3_omni_moe", "thinker_config": nested}
    assert decoder(deeper) == read


def test_what_stands_next_to_a_language_model_is_said() -> None:
    nested = {
        "model_type": "qwen3_vl_moe", "text_config": QWEN3, "vision_config": {"depth": 27},
        "audio_config": {"encoder_layers": 32}, "speech_config": None, "engram_config": {"n": 3},
        "quantization_config": {"bits": 8}, "image_token_id": 9,
    }  # fmt: skip
    read = decoder(nested)
    assert read.uncounted == ("vision", "audio", "engram")
    assert read.blocks == decoder(QWEN3).blocks
    flat = decoder(QWEN3, vision_config={"depth": 27})
    assert flat.uncounted == ("vision",)
    assert decoder(QWEN3).uncounted == ()


def test_top_k_and_widths_may_be_lists_of_every_block() -> None:
    hunyuan = {**QWEN3, "model_type": "hunyuan_v1_moe", "moe_topk": [1, 2, 2, 4],
               "moe_intermediate_size": [32, 32, 64, 64]}  # fmt: skip
    model = decoder(hunyuan, num_experts_per_tok=..., intermediate_size=...)
    sizes = [(part.top_k, part.d_hidden) for part in (_experts(model, at) for at in range(4))]
    assert sizes == [(1, 32), (2, 32), (2, 64), (4, 64)]


def test_runs_of_equal_blocks_are_recognised() -> None:
    assert decoder(DEEPSEEK).runs == ((0, 1, 0), (1, 3, 1))
    named = named_model("qwen3-next-80b-a3b").decoder
    assert len(named.kinds) == 2
    assert named.runs[:2] == ((0, 3, 0), (3, 1, 1))
    assert sum(count for _, count, _ in named.runs) == 48


def test_the_layer_to_plan_is_what_is_dispatched() -> None:
    layer = decoder(NEMOTRON).layer
    assert (layer.d_model, layer.d_hidden, layer.num_experts, layer.top_k) == (16, 32, 8, 2)
    assert layer.num_gemms == 2
    dense = named_model("llama-3-8b").decoder.layer
    assert (dense.d_model, dense.d_hidden, dense.num_experts) == (4096, 14336, 1)


def test_nemotron_patterns_have_two_spellings() -> None:
    listed = decoder(
        NEMOTRON,
        hybrid_override_pattern=...,
        layers_block_type=["mamba", "moe", "attention", "moe"],
    )
    assert listed == decoder(NEMOTRON)
    predicted = decoder(NEMOTRON, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    assert [len(model.blocks) for model in predicted.predictions] == [2]


def test_kimi_linear_counts_its_blocks_from_one() -> None:
    nested = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16, "num_heads": 4,
              "short_conv_kernel_size": 4}  # fmt: skip
    kimi = {**DEEPSEEK, "model_type": "kimi_linear", "linear_attn_config": nested, "num_experts": 8,
            "num_experts_per_token": 2, "num_shared_experts": 1, "num_expert_group": 1,
            "moe_renormalize": True}  # fmt: skip
    dropped = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group")
    model = decoder(kimi, **dict.fromkeys(dropped, ...), topk_group=1)
    names = [block.parts[0].name for block in model.blocks]  # type: ignore[union-attr]
    assert names == ["delta attention"] * 3 + ["latent attention"]


def test_mimo_reads_the_hub_and_version_5_alike() -> None:
    hub = {**QWEN3, "model_type": "mimo_v2_flash", "v_head_dim": 8, "swa_num_attention_heads": 8,
           "swa_num_key_value_heads": 4, "swa_head_dim": 16, "swa_v_head_dim": 8,
           "sliding_window": 16, "sliding_window_size": 16, "hybrid_layer_pattern": [0, 1, 1, 1],
           "moe_layer_freq": [0, 1, 1, 1], "add_swa_attention_sink_bias": True,
           "add_full_attention_sink_bias": False, "attention_chunk_size": 16}  # fmt: skip
    saved = {**QWEN3, "model_type": "mimo_v2_flash", "v_head_dim": 8, "sliding_window": 17,
             "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
             "mlp_layer_types": ["dense"] + ["sparse"] * 3}  # fmt: skip
    assert decoder(hub).parameters == decoder(saved).parameters


def test_gemma_4_reads_the_hub_and_version_5_alike() -> None:
    base = {**QWEN3, "model_type": "gemma4_text", "enable_moe_block": True, "top_k_experts": 2,
            "sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "tie_word_embeddings": True}  # fmt: skip
    hub = decoder(base, num_experts_per_tok=..., global_head_dim=32)
    saved = decoder(base, num_experts_per_tok=..., per_layer_config={"3": {"head_dim": 32}})
    assert hub == saved
    shared = decoder(base, num_experts_per_tok=..., global_head_dim=32, attention_k_eq_v=True,
                     num_global_key_value_heads=1)  # fmt: skip
    full = hub.blocks[3].parameters.attention - shared.blocks[3].parameters.attention
    assert full == 64 * 32 * (2 + 2 - 1)  # one key head instead of two, and no values
    assert hub.blocks[0].parameters.dense == 3 * 64 * 96
