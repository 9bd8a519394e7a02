"""Traps of configurations: spellings, nesting, counts against widths, and blocks that differ."""

import pytest

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
        "model_type": "qwen3_vl_moe",
        "text_config": {**inner, "model_type": "qwen3_vl_moe_text"},
        "vision_config": {"hidden_size": 1152, "depth": 27},
        "tie_word_embeddings": True,
    }
    read = decoder(nested)
    assert read.blocks == decoder(QWEN3).blocks
    assert read.is_tied  # as the outer configuration says
    assert read.parameters.head == 0
    deeper = {"model_type": "qwen3_omni_moe", "thinker_config": nested}
    assert decoder(deeper) == read


def test_what_stands_beside_a_language_model_is_said() -> None:
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


def test_version_5_spells_the_number_of_experts_otherwise() -> None:
    assert decoder(QWEN3, num_experts=..., num_local_experts=8) == decoder(QWEN3)


def test_shared_experts_are_a_count_in_one_family_and_a_width_in_another() -> None:
    counted = _experts(decoder(DEEPSEEK)).shared
    assert counted is not None
    assert counted.d_hidden == 2 * 32
    qwen2 = decoder(QWEN3, model_type="qwen2_moe", head_dim=..., shared_expert_intermediate_size=48)
    shared = _experts(qwen2).shared
    assert shared is not None
    assert shared.d_hidden == 48
    assert qwen2.blocks[0].parameters.shared == 3 * 64 * 48 + 64  # and its gate
    assert decoder(DEEPSEEK, n_shared_experts=None).blocks[-1].parameters.shared == 0


@pytest.mark.parametrize(
    ("changes", "with_experts"),
    [
        ({}, [1, 1, 1, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, [0, 0, 1, 1]),
    ],
)
def test_blocks_without_experts_in_qwen(
    changes: dict[str, object], with_experts: list[int]
) -> None:
    model = decoder(QWEN3, **changes)
    assert [block.routed is not None for block in model.blocks] == [bool(x) for x in with_experts]
    assert model.num_moe_layers == sum(with_experts)
    dense = [block.parameters.dense for block in model.blocks]
    assert dense == [0 if has else 3 * 64 * 96 for has in with_experts]


@pytest.mark.parametrize(
    ("changes", "with_experts"),
    [
        ({}, [0, 1, 1, 1]),
        ({"first_k_dense_replace": 2}, [0, 0, 1, 1]),
        ({"first_k_dense_replace": 0, "moe_layer_freq": 2}, [1, 0, 1, 0]),
        ({"first_k_dense_replace": ..., "moe_layer_freq": [0, 0, 1, 1]}, [0, 0, 1, 1]),
        ({"first_k_dense_replace": ..., "mlp_layer_types": ["dense"] * 3 + ["sparse"]},
         [0, 0, 0, 1]),
    ],
)  # fmt: skip
def test_first_dense_blocks_in_deepseek(
    changes: dict[str, object], with_experts: list[int]
) -> None:
    model = decoder(DEEPSEEK, **changes)
    assert [block.routed is not None for block in model.blocks] == [bool(x) for x in with_experts]


def test_llama_4_alternates_and_has_a_width_for_dense_blocks() -> None:
    llama = {
        **QWEN3, "model_type": "llama4_text", "intermediate_size": 32, "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "num_experts_per_tok": 1,
    }  # fmt: skip
    model = decoder(llama, moe_intermediate_size=...)
    assert [block.routed is not None for block in model.blocks] == [False, True, False, True]
    assert model.blocks[0].parameters.dense == 3 * 64 * 96
    assert model.blocks[1].parameters.shared == 3 * 64 * 32
    names = [block.parts[0].name for block in model.blocks]  # type: ignore[union-attr]
    assert names == ["attention, chunks of 16"] * 3 + ["attention"]
    listed = decoder(
        llama, moe_intermediate_size=..., interleave_moe_layer_step=..., moe_layers=[1, 3],
        no_rope_layers=[1, 1, 1, 0],
    )  # fmt: skip
    assert listed.blocks == model.blocks


def test_ernie_counts_experts_from_a_block_on() -> None:
    ernie = {
        **QWEN3, "model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
    }  # fmt: skip
    model = decoder(ernie, num_experts=..., num_experts_per_tok=...)
    assert [block.routed is not None for block in model.blocks] == [False, True, True, False]
    to_the_end = decoder(ernie, num_experts=..., num_experts_per_tok=..., moe_layer_end_index=-1)
    assert to_the_end.num_moe_layers == 3


def test_top_k_and_widths_may_be_lists_of_every_block() -> None:
    hunyuan = {
        **QWEN3, "model_type": "hunyuan_v1_moe", "moe_topk": [1, 2, 2, 4],
        "moe_intermediate_size": [32, 32, 64, 64],
    }  # fmt: skip
    model = decoder(hunyuan, num_experts_per_tok=..., intermediate_size=...)
    found = [(one.top_k, one.d_hidden) for one in (_experts(model, at) for at in range(4))]
    assert found == [(1, 32), (2, 32), (2, 64), (4, 64)]


def test_runs_of_equal_blocks_are_found() -> None:
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
    assert [len(one.blocks) for one in predicted.predictions] == [2]


def test_kimi_linear_counts_its_blocks_from_one() -> None:
    nested = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16, "num_heads": 4,
              "short_conv_kernel_size": 4}  # fmt: skip
    kimi = {
        **DEEPSEEK, "model_type": "kimi_linear", "linear_attn_config": nested, "num_experts": 8,
        "num_experts_per_token": 2, "num_shared_experts": 1, "num_expert_group": 1,
        "moe_renormalize": True,
    }  # fmt: skip
    dropped = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group")
    model = decoder(kimi, **dict.fromkeys(dropped, ...), topk_group=1)
    names = [block.parts[0].name for block in model.blocks]  # type: ignore[union-attr]
    assert names == ["delta attention"] * 3 + ["latent attention"]


def test_mimo_reads_the_hub_and_version_5_alike() -> None:
    hub = {
        **QWEN3, "model_type": "mimo_v2_flash", "v_head_dim": 8, "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4, "swa_head_dim": 16, "swa_v_head_dim": 8,
        "sliding_window": 16, "sliding_window_size": 16, "hybrid_layer_pattern": [0, 1, 1, 1],
        "moe_layer_freq": [0, 1, 1, 1], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "attention_chunk_size": 16,
    }  # fmt: skip
    saved = {
        **QWEN3, "model_type": "mimo_v2_flash", "v_head_dim": 8, "sliding_window": 17,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    }  # fmt: skip
    assert decoder(hub).parameters == decoder(saved).parameters


def test_gemma_4_reads_the_hub_and_version_5_alike() -> None:
    base = {
        **QWEN3, "model_type": "gemma4_text", "enable_moe_block": True, "top_k_experts": 2,
        "sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "tie_word_embeddings": True,
    }  # fmt: skip
    hub = decoder(base, num_experts_per_tok=..., global_head_dim=32)
    saved = decoder(base, num_experts_per_tok=..., per_layer_config={"3": {"head_dim": 32}})
    assert hub == saved
    shared = decoder(
        base, num_experts_per_tok=..., global_head_dim=32, attention_k_eq_v=True,
        num_global_key_value_heads=1,
    )  # fmt: skip
    full = hub.blocks[3].parameters.attention - shared.blocks[3].parameters.attention
    assert full == 64 * 32 * (2 + 2 - 1)  # one key head instead of two, and no values
    assert hub.blocks[0].parameters.dense == 3 * 64 * 96


def test_groups_and_the_score_of_the_router_are_read() -> None:
    router = _experts(decoder(DEEPSEEK)).router
    assert (router.score, router.num_groups, router.top_groups) == ("sigmoid", 4, 2)
    assert router.has_bias
    softmax = _experts(decoder(DEEPSEEK, scoring_func="softmax")).router
    assert softmax.score == "softmax"
    greedy = decoder(DEEPSEEK, model_type="deepseek_v2", topk_method="greedy")
    assert _experts(greedy).router.num_groups == 1


def test_harmless_fields_do_not_matter() -> None:
    extra = {
        "attention_dropout": 0.1, "bos_token_id": 1, "rope_theta": 1e6, "rope_scaling": {"a": 1},
        "quantization_config": {"bits": 8}, "torch_dtype": "bfloat16", "use_cache": True,
        "router_aux_loss_coef": 0.1, "initializer_range": 0.02, "output_router_logits": False,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "norm_topk_prob": True,
        "_name_or_path": "./out", "auto_map": {"AutoConfig": "a.B"}, "pad_token_id": 3,
        "eos_token_id": [1, 2], "ep_size": 1, "pretraining_tp": 1, "transformers_version": "4.51",
        "rope_parameters": {"rope_theta": 1e4}, "router_jitter_noise": 0.01, "seq_aux": True,
        "aux_loss_alpha": 0.001, "id2label": {"0": "LABEL_0"}, "top_k": 50, "temperature": 1.0,
        "partial_rotary_factor": 0.5, "unsloth_fixed": True, "architectures": ["AnyForCausalLM"],
        "routed_scaling_factor": 2.5, "resid_pdrop": 0.1, "hidden_dropout": 0.1,
        "use_qk_norm": True,
        "image_token_id": 9, "hc_eps": 1e-6, "position_embedding_type": "rope",
    }  # fmt: skip
    assert decoder(QWEN3, **extra) == decoder(QWEN3)
