"""What of a configuration is not counted: harmless fields, and towers beside the language model.

A field is harmless because its meaning is known, by its whole name. Endings decide for values
alone that cannot be a size: an index of a token, a probability, a name of a precision. Sources:
`PreTrainedConfig` and the configuration classes of transformers 5.24, and configurations of the
Hub that have more fields than their classes.
"""

from collections.abc import Iterator, Mapping

_GENERAL = """
_attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation
_name_or_path architectures attn_implementation auto_map chat_template dtype finetuning_task
id2label label2id license model_name model_type num_labels output_attentions
output_hidden_states output_router_logits output_scores prefix problem_type quantization
quantization_config return_dict return_dict_in_generate save_dtype tags task_specific_params
tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript transformers_version
transformers_weights unsloth_fixed unsloth_version use_bfloat16 use_cache use_return_dict
chunk_size_feed_forward is_decoder seed gradient_checkpointing use_flash_attn
use_flash_attention use_flash_attention_2 use_sdpa keys_to_ignore_at_inference
base_model_tp_plan base_model_pp_plan base_model_ep_plan compression_config sparsity_config
"""
_GENERATION = """
bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty generation_config length_penalty
max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
num_logits_to_keep num_return_sequences remove_invalid_values repetition_penalty suppress_tokens
temperature top_k top_p typical_p ignore_index
"""
_POSITIONS = """
attn_temperature_tuning attn_scale compress_rope_theta floor_scale global_rope_theta
initial_context_length layer_rope_theta local_rope_theta log_scaling_alpha log_scaling_n_floor
max_position_embeddings max_seq_len max_sequence_length model_max_length mrope_section
max_model_len n_ctx original_max_position_embeddings partial_rotary_factor
partial_rotary_factors rope_interleave rope_interleaved rope_local_base_freq rope_parameters
rope_scaling rope_theta rope_type rope_traditional rotary_dim rotary_emb_base rotary_pct
rotary_percent rotary_base seq_length seq_len swa_rope_theta use_mrope yarn_only_types
mrope_interleaved original_seq_len rope_factor beta_fast beta_slow mscale mscale_all_dim
no_rope_layers no_rope_layer_interval use_nope rope_head_dim_interleaved swa_rope_parameters
"""
_SCALES = """
attention_multiplier attention_softmax_in_fp32 attention_value_scale attn_logit_softcapping
attn_output_multiplier clip_qkv embedding_multiplier embedding_multiplier_scale embedding_scale
final_logit_softcapping hc_eps hc_magnitude hc_sinkhorn_iters kda_lower_bound
learnable_sink_init linear_lower_bound logit_scale logits_mup_width_multiplier logits_scaling
logits_scale max_attn_value moe_router_logit_softcapping moe_routed_scaling_factor
moe_router_scaling_factor norm_head norm_softmax output_multiplier output_multiplier_scale
qk_scale_factor query_pre_attn_scalar residual_multiplier route_norm route_scale
routed_scaling_factor router_scaling_factor scale_attn_weights scale_attn_by_inverse_layer_idx
scale_depth scale_emb softcap swiglu_alpha swiglu_limit swiglu_limits swiglu_limits_shared
reorder_and_upcast_attn activation_situ_beta activation_situ_linear_beta
residual_gate_temperature norm_topk_prob moe_renormalize norm_expert_weight mla_scale_q_lora
mla_scale_kv_lora
"""
_TRAINING = """
load_balance_coeff mup_enabled mtp_share_parameters aux_loss_alpha bias_update_speed embd_pdrop
emb_pdrop attn_pdrop resid_pdrop ep_size init_method init_std initializer_factor
initializer_range input_jitter_noise rescale_prenorm_residual router_jitter_noise jitter_eps
moe_capacity_factor moe_drop_tokens moe_eval_capacity_factor moe_jitter_eps
moe_random_routing_dropped_token mtp_loss_scaling_factor mtp_loss_weight mup_base_width
need_fp32_gate norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon rms_norm_eps
pretraining_tp residual_in_fp32 route_bias_update_speed router_aux_loss_coef aux_loss_coef
router_dtype router_z_loss_coef z_loss_coef seq_aux time_step_floor time_step_limit
time_step_max time_step_min use_associative_scan use_mamba_kernels mamba_chunk_size chunk_size
mamba_hidden_act mamba_ssm_cache_dtype mamba_ssm_dtype moe_router_dtype
moe_shared_expert_overlap output_gate_type expert_dtype fp32_lm_head calc_aux_loss_in_router
layerdrop enable_moe_fp32_combine moe_impl use_grouped_mm use_grouped_gemm
"""
_HARMLESS = frozenset(f"{_GENERAL} {_GENERATION} {_POSITIONS} {_SCALES} {_TRAINING}".split())
_VALUES = {
    "position_embedding_type": ("rope", "rotary", "nope", "none", "alibi"),
    "normalization_function": ("rmsnorm",),
    "norm_type": ("rms", "rmsnorm", "RMSNorm"),
    "attention_method": ("MLA", "GQA", "MHA"),
    "attn_type": ("softmax",),
}
"""Words that name what the reader counts anyway; others would have other sizes."""
_INDEXES = ("_token_id", "_token_ids", "_token_index")
_WORDS = ("_dtype", "_version", "_implementation")
_FRACTIONS = ("dropout", "dropout_prob", "_eps", "_epsilon", "_loss_coef", "_pdrop")
_NESTED = (
    "text_config", "thinker_config", "llm_config", "language_config", "language_model",
    "llm_text_config",
)  # fmt: skip
_SHARED = ("model_type", "tie_word_embeddings")
"""Fields that a nested configuration has from the outer one where it lacks them."""
_TOWERS: Mapping[str, str] = {
    "vision_config": "vision",
    "visual_config": "vision",
    "visual": "vision",
    "vit_config": "vision",
    "vision_tower_config": "vision",
    "image_config": "vision",
    "img_token_compression_config": "vision",
    "perceiver_config": "vision",
    "projector_config": "vision",
    "vq_config": "image tokens",
    "audio_config": "audio",
    "sound_config": "audio",
    "speech_config": "audio",
    "audio_encoder_config": "audio",
    "talker_config": "speech",
    "code2wav_config": "speech",
    "token2wav_config": "speech",
    "tts_config": "speech",
    "audio_decoder_config": "speech",
}


def is_harmless(name: str, value: object) -> bool:
    """Return whether a field changes neither sizes nor costs."""
    if name in _HARMLESS:
        return True
    if name in _VALUES:
        return value in _VALUES[name]
    if isinstance(value, str):
        return name.endswith(_WORDS)
    if isinstance(value, float):
        return name.endswith(_FRACTIONS) and 0 < value < 1
    return name.endswith(_INDEXES)


def language_model(document: Mapping[str, object]) -> tuple[Mapping[str, object], tuple[str, ...]]:
    """Return the fields of the language model, and what the parts beside it are for.

    A vision-language model nests its language model. Configurations next to it are of towers, such
    as ("vision", "audio"), and no part of the fields that are returned.
    """
    values, towers = document, dict.fromkeys(_towers_of(document))
    for _ in range(2):
        name = next((key for key in _NESTED if isinstance(values.get(key), Mapping)), "")
        inner = values.get(name)
        if isinstance(inner, Mapping):
            towers |= dict.fromkeys((*_others_of(values), *_towers_of(inner)))
            outer = {key: values[key] for key in _SHARED if values.get(key) is not None}
            values = {**outer, **inner}
    if values.get("model_type") == "dbrx":
        values = _flattened(values)
    return {key: value for key, value in values.items() if key not in _TOWERS}, tuple(towers)


def _towers_of(values: Mapping[str, object]) -> Iterator[str]:
    return (_TOWERS[key] for key in values if key in _TOWERS and values[key])


def _others_of(values: Mapping[str, object]) -> Iterator[str]:
    """Return names of nested configurations that are neither the language model nor known."""
    for key, value in values.items():
        is_named = key in _NESTED or key in _TOWERS or is_harmless(key, value)
        if isinstance(value, Mapping) and value and key.endswith("_config") and not is_named:
            yield key.removesuffix("_config").replace("_", " ")


def _flattened(values: Mapping[str, object]) -> Mapping[str, object]:
    """Return DBRX's fields with those of its two nested configurations."""
    flat = dict(values)
    for key in ("ffn_config", "attn_config"):
        inner = flat.pop(key, None)
        if isinstance(inner, Mapping):
            flat |= {name: value for name, value in inner.items() if name != "model_type"}
    return flat
