"""Families of models by `model_type`: a row of traits each (see `family.Family`).

A row has its types, and the traits that differ from a base. Source: the configuration and model
classes of transformers 5.24.0; comments name the source of families without a class.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from moetune.huggingface import kinds, mixers
from moetune.huggingface.family import Family

_EXPERTS_ALONE = ("intermediate_size",)
_GROUPED = Family(attention=mixers.grouped_query)
_DENSE = replace(_GROUPED, sparse=kinds.no_block, needs_head_dim=False)
_LAYER_NORMS = replace(_DENSE, needs_kv_heads=False, is_gated=False, norms=4, has_norm_biases=True)
_MIXTRAL = replace(_GROUPED, needs_head_dim=False, expert_width=_EXPERTS_ALONE)
_QWEN = replace(_GROUPED, sparse=kinds.qwen_experts, qk_norm="head")
_SHARED_QWEN = replace(_QWEN, shared="width", shared_width=("shared_expert_intermediate_size",))
_QWEN_NEXT = replace(
    _SHARED_QWEN,
    linear=mixers.gated_delta,
    kinds=kinds.interval,
    gate="full",
    has_shared_gate=True,
    only={"attn_output_gate": (True,)},
)
_GRANITE = replace(
    _MIXTRAL,
    needs_kv_heads=False,
    shared="optional_width",
    shared_width=("shared_intermediate_size",),
    score="softmax_of_top_k",
)
_DEEPSEEK = replace(
    _GROUPED,
    attention=mixers.latent,
    sparse=kinds.after_dense,
    shared="count",
    score="sigmoid",
    only={"use_mla": (True,)},
    harmless="lm_head",
)
_GLM = replace(_DEEPSEEK, attention=mixers.grouped_query, qk_norm="head")
_ROWS: Mapping[str, Family] = {
    "llama mistral ministral3 smollm3 granite iquestcoder": replace(_DENSE, kinds=kinds.windowed,
        needs_kv_heads=False, mlp_bias="mlp_bias", only={"activation": ("swiglu",)}),
    "qwen2 qwen2_vl_text qwen2_5_vl_text mimo": replace(_DENSE, kinds=kinds.qwen_window,
        qkv_bias=True, out_bias=False, only={"attention_bias": (True,)}),
    "phi3": replace(_DENSE, kinds=kinds.windowed, needs_kv_heads=False, qkv_bias=False,
        harmless="full_attn_mod interpolate_factor"),
    "ernie4_5": replace(_DENSE, qkv_bias="use_bias", mlp_bias="use_bias", is_tied=True),
    "gemma2": replace(_GROUPED, kinds=kinds.alternate, sparse=kinds.no_block, norms=4,
        is_tied=True),
    "gemma3_text": replace(_QWEN, kinds=kinds.gemma3, sparse=kinds.no_block, norms=4,
              is_tied=True,
        omitted={"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
              "head_dim": 256}),
    "olmo2 olmo3": replace(_DENSE, needs_kv_heads=False, qk_norm="full"),
    "glm4": replace(_DENSE, out_bias=False, norms=4),
    "exaone4": replace(_DENSE, kinds=kinds.every_fourth, qkv_bias=False, qk_norm="head"),
    "hunyuan_v1_dense": replace(_DENSE, qk_norm="head", is_tied=True),
    "seed_oss": replace(_GROUPED, sparse=kinds.no_block, has_bias_by_default=True,
        out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "nemotron": replace(_LAYER_NORMS, mlp_bias="mlp_bias"),
    "gpt2": replace(_LAYER_NORMS, qkv_bias=True, mlp_bias=True, dense_width=("n_inner",),
        dense_ratio=4, positions=("n_positions", "max_position_embeddings"), is_tied=True,
        harmless="""summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj"""),
    "qwen3 qwen3_vl_text": replace(_DENSE, kinds=kinds.qwen_window, qk_norm="head"),
    "qwen3_5_text": replace(_QWEN_NEXT, sparse=kinds.no_block),
    "grok-1": replace(_MIXTRAL, qkv_bias=False, norms=4, is_tied=True),
    "mixtral": replace(_MIXTRAL, kinds=kinds.windowed, qkv_bias=False),
    "phimoe": replace(_MIXTRAL, kinds=kinds.windowed, score="sparsemixer", norms=4,
        has_norm_biases=True, head_bias="lm_head_bias"),
    "granitemoe granitemoeshared": _GRANITE,
    "granitemoehybrid": replace(_GRANITE, linear=mixers.mamba2,
        sparse=kinds.if_experts(kinds.every_block), dense_width=("shared_intermediate_size",),
        harmless="intermediate_size"),
    "granitemoe_swa": replace(_GRANITE, sinks=("full", "sliding")),
    "gpt_oss": replace(_GROUPED, kinds=kinds.alternate, has_bias_by_default=True,
        sinks=("full", "sliding"), expert_width=_EXPERTS_ALONE, score="softmax_of_top_k",
        router_parameters=1, expert_biases=True),
    "minimax minimax_text_01 minimax_m1": replace(_MIXTRAL, linear=mixers.lightning,
        kinds=kinds.lightning, qkv_bias=False,
        harmless="""full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor
        linear_attn_beta_factor mlp_alpha_factor mlp_beta_factor
        layernorm_full_attention_alpha layernorm_full_attention_beta
        layernorm_linear_attention_alpha layernorm_linear_attention_beta layernorm_mlp_alpha
        layernorm_mlp_beta postnorm shared_moe_mode"""),
    "minimax_m2": replace(_GROUPED, kinds=kinds.softmax_listed, qkv_bias=False, qk_norm="full",
        expert_width=_EXPERTS_ALONE, shared="optional_width",
        shared_width=("shared_intermediate_size",), score="sigmoid",
        only={"qk_norm_type": ("per_layer",), "use_routing_bias": (True,)},
        harmless="""layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta
        mlp_intermediate_size shared_moe_mode"""),
    "qwen2_moe": replace(_DENSE, kinds=kinds.qwen_window, sparse=kinds.qwen_experts,
        qkv_bias="qkv_bias", has_bias_by_default=True, out_bias=False, shared="width",
        shared_width=("shared_expert_intermediate_size",), has_shared_gate=True),
    "qwen3_moe qwen3_vl_moe_text qwen3_omni_moe_text qwen3_omni_moe_thinker": replace(_QWEN,
        kinds=kinds.qwen_window, needs_head_dim=False),
    "qwen3_next qwen3_5_moe_text": _QWEN_NEXT,
    "flint": replace(_SHARED_QWEN, sinks=("full", "sliding"), score="sigmoid"),
    "laguna": replace(_SHARED_QWEN, gate="head", score="sigmoid", router_parameters=1,
        only={"gating": (True, "per-head")}, harmless="moe_apply_router_weight_on_input"),
    "mellum": replace(_QWEN, kinds=kinds.qwen_window),
    "olmoe flex_olmo": replace(_MIXTRAL, needs_kv_heads=False, qk_norm="full"),
    # modeling_deepseek.py of deepseek-ai/deepseek-moe-16b-base
    "deepseek": replace(_DENSE, sparse=kinds.after_dense, needs_kv_heads=False, shared="count"),
    "deepseek_v2": replace(_DEEPSEEK, mlp_bias="mlp_bias", score="softmax"),
    "deepseek_v3 kimi_k2 glm4_moe_lite": replace(_DEEPSEEK, needs_groups=True),
    "sarvam_mla": replace(_DEEPSEEK, needs_query_rank=False),
    "sarvam_moe": replace(_GLM, qk_norm_flag="use_qk_norm"),
    "axk1": replace(_DEEPSEEK, norms_of_experts=1),
    "mistral4": replace(_DEEPSEEK, sparse=kinds.after_any_dense, score="softmax"),
    "deepseek_v32 glm_moe_dsa": replace(_DEEPSEEK, kinds=kinds.indexed, needs_groups=True,
        mlp_bias="mlp_bias", harmless="index_share_for_mtp_iteration indexer_rope_interleave"),
    "deepseek_v4": replace(_GROUPED, attention=mixers.compressed, kinds=kinds.ratios,
              shared="one", score="sqrtsoftplus", has_balance_bias=True, streams="full",
        only={"attention_bias": (False,), "mlp_bias": (False,)},
        harmless="num_hash_layers compress_rates compress_rate_csa compress_rate_hca"),
    "glm4_moe glm4v_moe_text": replace(_GLM, needs_head_dim=False, out_bias=False,
        qk_norm_flag="use_qk_norm"),
    "dots1 exaone_moe": replace(_GLM, kinds=kinds.every_fourth, needs_head_dim=False,
        harmless="max_window_layers"),
    "solar_open": replace(_DEEPSEEK, attention=mixers.grouped_query,
              sparse=kinds.after_any_dense),
    "hy_v3": replace(_GLM, mlp_bias="mlp_bias",
        expert_width=("moe_intermediate_size", "expert_hidden_dim"),
        only={"moe_router_use_sigmoid": (True,)}, harmless="moe_router_enable_expert_bias"),
    "mimo_v2_flash": replace(_DEEPSEEK, attention=mixers.mimo, kinds=kinds.mimo,
        sinks=("sliding",), shared="none", harmless="attention_chunk_size"),
    "beam": replace(_GLM, has_head_parameters=True, gate="full", shared="none", norms=4),
    "afmoe": replace(_GLM, kinds=kinds.every_fourth, gate="full", router_parameters=1, norms=4),
    "kimi_linear": replace(_DEEPSEEK, linear=mixers.kimi_delta, kinds=kinds.kimi, gate="full",
        gate_flag="mla_use_output_gate", latent_width=("routed_expert_hidden_size",),
        has_residual_bank=True, harmless="mla_use_nope use_grouped_topk"),
    # mlx-lm, bailing_moe.py; Megatron-Bridge, modeling_bailing_moe_v2.py
    "bailing_moe bailing_moe_v2": replace(_GLM, needs_head_dim=False, qkv_bias="use_qkv_bias",
        out_bias="use_bias", mlp_bias="use_bias", qk_norm_flag="use_qk_norm",
        shared_width=("moe_shared_expert_intermediate_size",), score="softmax",
        only={"use_bias": (False,), "use_rmsnorm": (True,)},
        harmless="moe_router_enable_expert_bias"),
    "bailing_hybrid": replace(_DEEPSEEK, linear=mixers.bailing_delta, kinds=kinds.grouped_layers,
        needs_query_rank=False, gate="head",
              shared_width=("moe_shared_expert_intermediate_size",),
        only={"gated_attention_proj_granularity_type": ("head_wise",), "no_kda_lora": (True,),
              "use_qk_norm": (True,)},
        harmless="moe_router_enable_expert_bias linear_silu max_window_layers group_norm_size"),
    "ernie4_5_moe": replace(_DENSE, sparse=kinds.ernie_experts, qkv_bias="use_bias",
        mlp_bias="use_bias", shared="count", has_balance_bias=True, router_parameters=1,
        head_bias="use_bias", is_tied=True, only={"moe_gate": ("topk",), "use_rmsnorm": (True,)},
        harmless="moe_norm_min moe_capacity moe_use_aux_free"),
    "llama4_text": replace(_GROUPED, kinds=kinds.chunked, sparse=kinds.llama4_experts,
        dense_width=("intermediate_size_mlp",), expert_width=_EXPERTS_ALONE, shared="one",
        score="sigmoid", has_balance_bias=False, harmless="use_qk_norm for_llm_compressor"),
    "longcat_flash longcat_flash_ngram": replace(_GROUPED, attention=mixers.latent,
        dense_width=("ffn_hidden_size", "intermediate_size"),
        expert_width=("expert_ffn_hidden_size", "moe_intermediate_size"), has_balance_bias=True,
        has_ngrams=True, has_shortcut=True,
        only={"zero_expert_type": ("identity",), "router_bias": (False,)}),
    "nemotron_h": replace(_GROUPED, linear=mixers.mamba2, mlp_bias="mlp_bias", shared="width",
        shared_width=("moe_shared_expert_intermediate_size",), score="sigmoid", is_gated=False,
        norms=1, has_pattern=True, harmless="sliding_window n_shared_experts time_step_rank"),
    "step3p5 step3p7": replace(_GLM, attention=mixers.step, sparse=kinds.step_experts,
        mlp_bias="mlp_bias", gate="head", shared="width",
        shared_width=("share_expert_dim", "share_expert_dims"),
        only={"use_moe": (True,), "use_head_wise_attn_gate": (True,), "moe_layer_offset": (0,)},
        harmless="use_moe_router_bias n_shared_experts"),
    "hunyuan_v1_moe": replace(_MIXTRAL, qk_norm="head",
        expert_width=("moe_intermediate_size", "intermediate_size"), shared="one", is_tied=True,
        only={"use_cla": (False,), "use_mixed_mlp_moe": (True,), "moe_layer_num_skipped": (0,),
              "norm_type": ("rms",)},
        harmless="intermediate_size cla_share_factor group_limited_greedy"),
    "jamba": replace(_MIXTRAL, linear=mixers.mamba1, kinds=kinds.jamba,
        sparse=kinds.if_experts(kinds.periodic("expert_layer_period", "expert_layer_offset"),
              least=2), qkv_bias=False),
    "dbrx": replace(_MIXTRAL, needs_kv_heads=False, qkv_bias=False,
        expert_width=("ffn_hidden_size",),
        harmless="""ffn_act_fn moe_loss_weight moe_normalize_expert_weights
        uniform_expert_assignment"""),
    "lfm2_moe": replace(_GLM, linear=mixers.short_convolution, kinds=kinds.convolutions,
        needs_head_dim=False, qkv_bias=False, shared="none", is_tied=True,
        harmless="use_expert_bias"),
    "cohere2_moe": replace(_GROUPED, kinds=kinds.every_fourth, sparse=kinds.after_any_dense,
        dense_width=("prefix_dense_intermediate_size",), expert_width=_EXPERTS_ALONE,
        shared="count", norms=1, is_tied=True,
        harmless="""expert_selection_fn shared_expert_combination_strategy
        prefix_dense_sliding_window_pattern"""),
    "dots3_note_text": replace(_DEEPSEEK, attention=mixers.dots_note, kinds=kinds.indexed,
        mlp_bias="mlp_bias", gate="head", shared_width=("shared_experts_intermediate_size",)),
    "hy_v4 hy_v4_vl_text": replace(_DEEPSEEK, has_head_parameters=True, kinds=kinds.indexed,
        gate="full", streams="diagonal"),
    "glm5_next_text": replace(_DEEPSEEK, attention=mixers.pooled_latent,
              linear=mixers.kimi_delta, streams="full", mixes_streams_at_end=False,
        harmless="index_kpool_always_select_tail linear_lower_bound indexer_types"),
    "gemma4_text": replace(_QWEN, attention=mixers.gemma, kinds=kinds.gemma,
        sparse=kinds.gemma_experts, router_parameters=1, has_router_scale=True,
        has_parallel_dense=True, norms_of_experts=3, norms=4, is_tied=True,
        only={"use_bidirectional_attention": ("vision",)}, harmless="vocab_size_per_layer_input"),
    "minimax_m3_vl_text minimax_m3": replace(_GLM, kinds=kinds.sparse_listed,
        sparse=kinds.after_any_dense, qkv_bias=False, dense_width=("dense_intermediate_size",),
        expert_width=("intermediate_size", "moe_intermediate_size"), shared="width",
        shared_width=("shared_intermediate_size",), predictions=("num_mtp_modules",),
        only={"qk_norm_type": ("per_head",), "n_shared_experts": (1,),
              "use_gemma_norm": (True,)}, harmless="use_routing_bias num_nextn_predict_layers"),
    "muse_spark_text": replace(_GROUPED, gate="full", score="sigmoid", has_balance_bias=False,
        latent_width=("moe_hidden_size",), has_latent_norms=True, norms=5,
        harmless="post_norm_eps"),
}  # fmt: skip
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: replace(row, name=name) for names, row in _ROWS.items() for name in names.split()}
)
