"""Mixers of a block, built from a configuration's fields: attention, recurrences, convolutions."""

from dataclasses import replace

from moetune.domain.architecture import Mixer
from moetune.domain.attention import (
    CompressedAttention,
    GroupedQueryAttention,
    Indexer,
    LatentAttention,
)
from moetune.domain.recurrent import GatedDeltaNet, LinearAttention, ShortConvolution, StateSpace
from moetune.huggingface.family import Family, has_bias
from moetune.huggingface.fields import HEADS, KEY_HEADS, WIDTH, Fields
from moetune.huggingface.kinds import MixerKind

HEAD_WIDTH = ("head_dim", "attention_head_dim")


def head_dim(fields: Fields, *names: str) -> int:
    """Return the width of a head: a field, or the model's width divided by the heads.

    It is reported if there is no field and the heads do not divide the width.
    """
    width = fields.optional(*(names or HEAD_WIDTH))
    if width is not None:
        return width
    d_model, heads = fields.count(*WIDTH), fields.count(*HEADS)
    if d_model % heads:
        fields.report(
            f"hidden_size ({d_model}) does not divide by num_attention_heads ({heads}), and "
            "head_dim is missing",
            "add head_dim, or correct one of the two",
        )
    return d_model // heads


def window_of(fields: Fields, kind: MixerKind) -> int | None:
    """Return the most keys that a token reads; None for all."""
    if kind == "sliding":
        return fields.count("sliding_window", "sliding_window_size")
    return None


def grouped_query(fields: Fields, family: Family, kind: MixerKind) -> GroupedQueryAttention:
    """Return grouped-query attention."""
    is_sliding = kind == "sliding"
    swa = "swa_" if is_sliding and fields.has("swa_num_attention_heads") else ""
    heads = fields.count(*((f"{swa}num_attention_heads",) if swa else HEADS))
    keys = (f"{swa}num_key_value_heads",) if swa else KEY_HEADS
    has_keys = family.needs_kv_heads
    kv_heads = fields.or_null(*keys, null=heads) if has_keys else fields.optional(*keys)
    kv_heads = kv_heads or heads
    if family.needs_head_dim and not swa:
        width = fields.count(*HEAD_WIDTH)
    else:
        width = head_dim(fields, f"{swa}head_dim") if swa else head_dim(fields)
    value_width = fields.count(f"{swa}v_head_dim", default=width)
    d_model = fields.count(*WIDTH)
    has_qkv = has_bias(fields, family.qkv_bias, default=family.has_bias_by_default)
    has_out = has_qkv if family.out_bias is None else has_bias(fields, family.out_bias)
    output = heads * value_width
    return GroupedQueryAttention(
        d_model=d_model,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        v_head_dim=value_width,
        window=window_of(fields, kind),
        chunk=fields.count("attention_chunk_size") if kind == "chunked" else None,
        gate_width=_gate(fields, family, heads=heads, output=output),
        qkv_biases=(heads * width + kv_heads * (width + value_width)) if has_qkv else 0,
        out_biases=d_model if has_out else 0,
        norm_parameters=_norms(fields, family, heads=heads, kv_heads=kv_heads, width=width)
        + heads * family.has_head_parameters,
        num_sinks=heads if kind in family.sinks else 0,
        indexer=block_indexer(fields, d_model) if kind == "indexed" else None,
    )


def _gate(fields: Fields, family: Family, *, heads: int, output: int) -> int:
    if family.gate == "none" or (family.gate_flag and not fields.flag(family.gate_flag)):
        return 0
    return output if family.gate == "full" else heads


def _norms(fields: Fields, family: Family, *, heads: int, kv_heads: int, width: int) -> int:
    if family.qk_norm == "none":
        return 0
    if family.qk_norm_flag:
        if not fields.flag(family.qk_norm_flag):
            return 0
    else:
        fields.only("use_qk_norm", (True,))
        fields.only("qk_norm", (True,))
    return 2 * width if family.qk_norm == "head" else (heads + kv_heads) * width


def indexer_of(fields: Fields, rank: int) -> Indexer:
    """Return the scorer of sparse attention; its queries come from the latent query."""
    width = fields.count("index_head_dim")
    return Indexer(
        d_model=fields.count(*WIDTH),
        rank=rank,
        num_heads=fields.count("index_n_heads"),
        head_dim=width,
        top_k=fields.count("index_topk"),
        norm_parameters=2 * width,
    )


def block_indexer(fields: Fields, d_model: int) -> Indexer:
    """Return MiniMax-M3's scorer, which selects blocks of keys for each group of queries."""
    nested = fields.nested_fields("sparse_attention_config")
    inner = fields if nested is None else nested
    width = inner.count("index_head_dim", "sparse_index_dim")
    block = inner.count("index_block_size", "sparse_block_size")
    inner.skip("index_local_blocks", "sparse_local_block", "sparse_init_block",
               "sparse_score_type", "sparse_disable_index_value", "use_sparse_attention",
               "sparse_attention_freq")  # fmt: skip
    return Indexer(
        d_model=d_model,
        rank=d_model,
        num_heads=inner.count("index_n_heads", "sparse_num_index_heads"),
        head_dim=width,
        top_k=block * inner.count("index_topk_blocks", "sparse_topk_blocks"),
        norm_parameters=2 * width,
        has_weights=False,
    )


def latent(fields: Fields, family: Family, kind: MixerKind) -> LatentAttention:
    """Return multi-head latent attention, sparse where the kind is `indexed`."""
    d_model = fields.count(*WIDTH)
    heads = fields.count(*HEADS)
    fields.optional("num_key_value_heads")
    kv_rank = fields.count("kv_lora_rank")
    name = "q_lora_rank"
    q_rank = fields.or_null(name, null=None) if family.needs_query_rank else fields.optional(name)
    rope = fields.count("qk_rope_head_dim", least=0)
    nope = fields.count("qk_nope_head_dim")
    value = fields.count("v_head_dim")
    whole = fields.optional("qk_head_dim")
    if whole is not None and whole != rope + nope:
        fields.report(
            f"qk_head_dim ({whole}) is not qk_nope_head_dim + qk_rope_head_dim ({nope} + {rope})",
            "correct one of the three, or omit qk_head_dim",
        )
    fields.skip("head_dim")  # of the rotary part, or unused: the class ignores it
    biases = d_model + kv_rank + rope + (q_rank or 0)
    return LatentAttention(
        d_model=d_model,
        num_heads=heads,
        q_rank=q_rank,
        kv_rank=kv_rank,
        nope_dim=nope,
        rope_dim=rope,
        v_head_dim=value,
        indexer=indexer_of(fields, q_rank or d_model) if kind == "indexed" else None,
        top_keys=fields.count("index_topk") if kind == "borrowed" else None,
        biases=biases if has_bias(fields, family.qkv_bias) else 0,
        gate_width=_gate(fields, family, heads=heads, output=heads * value),
        norm_parameters=heads * family.has_head_parameters,
        window=window_of(fields, kind),
    )


def compressed(fields: Fields, _family: Family, kind: MixerKind) -> Mixer:
    """Return DeepSeek-V4's attention; its rates are 4 with an indexer and 128 without."""
    fields.skip("num_key_value_heads", "qk_rope_head_dim")
    rank = fields.count("q_lora_rank")
    rate = {"compressed": 4, "heavy": 128}.get(kind, 0)
    return CompressedAttention(
        d_model=fields.count(*WIDTH),
        num_heads=fields.count(*HEADS),
        head_dim=fields.count("head_dim"),
        q_rank=rank,
        window=fields.count("sliding_window"),
        out_groups=fields.count("o_groups"),
        out_rank=fields.count("o_lora_rank"),
        rate=rate,
        indexer=indexer_of(fields, rank) if kind == "compressed" else None,
    )


def mimo(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return MiMo-V2's attention; windows have twice the key heads by default."""
    full = grouped_query(fields, family, "full")
    has_sinks = fields.flag("add_full_attention_sink_bias")
    if kind == "full":
        return replace(full, num_sinks=full.num_heads if has_sinks else 0)
    heads = fields.count("swa_num_attention_heads", default=full.num_heads)
    kv_heads = fields.count("swa_num_key_value_heads", default=2 * full.num_kv_heads)
    inclusive = fields.optional("sliding_window_size")
    window = fields.optional("sliding_window") or (inclusive or 0) + 1
    return replace(
        full,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.count("swa_head_dim", default=full.head_dim),
        v_head_dim=fields.count("swa_v_head_dim", default=full.v_head_dim),
        window=window,
        num_sinks=heads if fields.flag("add_swa_attention_sink_bias", default=True) else 0,
    )


def step(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return Step-3.5's attention: windows may have another number of heads."""
    plain = grouped_query(fields, family, kind)
    of_windows = fields.nested_fields("attention_other_setting")
    if kind != "sliding":
        fields.optional("num_sliding_attention_heads")
        return plain
    heads = fields.optional("num_sliding_attention_heads")
    kv_heads = plain.num_kv_heads
    if of_windows is not None:
        of_windows.skip("attention_type", "true_head_dim")
        of_windows.only("head_dim", (plain.head_dim,))
        heads = of_windows.count("num_attention_heads")
        kv_heads = of_windows.count("num_attention_groups", default=kv_heads)
    heads = heads or plain.num_heads
    return replace(
        plain, num_heads=heads, num_kv_heads=kv_heads, gate_width=heads if plain.gate_width else 0
    )


def dots_note(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return dots3-note's latent attention: the rotary key has a further norm."""
    plain = latent(fields, family, kind)
    return replace(plain, norm_parameters=plain.rope_dim)


def gemma(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return Gemma 4's attention: full blocks have wider heads, whose keys may be the values.

    Blocks that share keys and values with earlier blocks are reported: they are not supported.
    """
    fields.only("num_kv_shared_layers", (0,))
    shares = fields.flag("attention_k_eq_v")
    plain = grouped_query(fields, family, kind)
    wide = fields.optional("global_head_dim")
    heads = fields.optional("num_global_key_value_heads")
    if kind != "full":
        return plain
    if "head_dim" not in fields.overrides and wide is not None:
        plain = replace(plain, head_dim=wide, v_head_dim=wide, norm_parameters=2 * wide)
    if shares and heads is not None:
        plain = replace(plain, num_kv_heads=heads)
    return replace(plain, has_value_projection=not shares)


def pooled_latent(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return GLM-5-Next's latent attention: its indexer also scores pooled keys."""
    plain = latent(fields, family, kind)
    pool = fields.count("index_kpool", default=0, least=0)
    if plain.indexer is None or not pool:
        return plain
    gate = pool * plain.indexer.head_dim + plain.indexer.head_dim * plain.d_model
    norms = plain.indexer.norm_parameters + gate
    return replace(plain, indexer=replace(plain.indexer, norm_parameters=norms))


def gated_delta(fields: Fields, _family: Family, _kind: MixerKind) -> Mixer:
    """Return a gated delta net (Qwen3-Next, Qwen3.5)."""
    heads = fields.count("linear_num_value_heads")
    value = fields.count("linear_value_head_dim")
    return GatedDeltaNet(
        d_model=fields.count(*WIDTH),
        num_key_heads=fields.count("linear_num_key_heads"),
        num_value_heads=heads,
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=value,
        kernel=fields.count("linear_conv_kernel_dim"),
        gate_width=heads * value,
        num_head_gates=2 * heads,
        extra_parameters=2 * heads + value,
    )


def _delta(
    fields: Fields, *, heads: int, width: int, kernel: int, gate_width: int, gate_rank: int = 0
) -> GatedDeltaNet:
    """Return delta attention with a decay for each channel, and equal key and value heads."""
    return GatedDeltaNet(
        d_model=fields.count(*WIDTH),
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=width,
        value_dim=width,
        kernel=kernel,
        gate_width=gate_width,
        num_head_gates=heads,
        gate_rank=gate_rank,
        extra_parameters=heads * width + heads + width,
    )


def kimi_delta(fields: Fields, _family: Family, _kind: MixerKind) -> Mixer:
    """Return Kimi Delta Attention: decay for each channel, and output gate, of low rank."""
    nested = fields.nested_fields("linear_attn_config")
    inner, prefix = (fields, "linear_") if nested is None else (nested, "")
    heads, width = inner.count(f"{prefix}num_heads"), inner.count(f"{prefix}head_dim")
    inner.skip("gate_lower_bound")
    kernel = inner.count("short_conv_kernel_size", "linear_conv_kernel_dim", default=4)
    gate_width = heads * width if inner.flag("use_full_rank_gate") else 0
    return _delta(
        fields, heads=heads, width=width, kernel=kernel, gate_width=gate_width, gate_rank=width
    )


def bailing_delta(fields: Fields, _family: Family, _kind: MixerKind) -> Mixer:
    """Return Ling's delta attention: decay and output gate are projected at full rank.

    The authors' code, BailingMoeV3, uses the heads of full attention and `head_dim`.
    """
    fields.skip("kda_safe_gate", "short_conv_kernel_size")
    heads = fields.optional("linear_num_heads") or fields.count(*HEADS)
    width = fields.optional("linear_head_dim") or fields.count("head_dim")
    kernel = fields.count("linear_conv_kernel_dim", "short_conv_kernel_size")
    return _delta(fields, heads=heads, width=width, kernel=kernel, gate_width=2 * heads * width)


def lightning(fields: Fields, _family: Family, _kind: MixerKind) -> Mixer:
    """Return lightning attention (MiniMax-Text-01): every head has separate keys and values."""
    heads, width = fields.count(*HEADS), head_dim(fields)
    fields.skip("block_size")
    return LinearAttention(
        d_model=fields.count(*WIDTH),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width,
        gate_width=heads * width,
        extra_parameters=heads * width,
    )


def mamba2(fields: Fields, _family: Family, _kind: MixerKind) -> Mixer:
    """Return a Mamba-2 mixer (Nemotron-H, Granite 4)."""
    heads = fields.count("mamba_num_heads", "mamba_n_heads")
    width = fields.count("mamba_head_dim", "mamba_d_head")
    state = fields.count("ssm_state_size", "mamba_d_state")
    groups = fields.count("n_groups", "mamba_n_groups")
    fields.skip("expand", "mamba_expand")
    d_model, inner = fields.count(*WIDTH), heads * width
    channels = inner + 2 * groups * state
    biases = channels if fields.flag("use_conv_bias", "mamba_conv_bias", default=True) else 0
    if fields.flag("mamba_proj_bias", "use_bias"):
        biases += inner + channels + heads + d_model
    return StateSpace(
        d_model=d_model,
        d_inner=inner,
        d_state=state,
        kernel=fields.count("conv_kernel", "mamba_d_conv"),
        num_groups=groups,
        num_heads=heads,
        extra_parameters=3 * heads + inner + biases,
    )


def mamba1(fields: Fields, _family: Family, _kind: MixerKind) -> Mixer:
    """Return a Mamba-1 mixer with norms of its time steps and states (Jamba)."""
    d_model, state = fields.count(*WIDTH), fields.count("mamba_d_state")
    inner = fields.count("mamba_expand") * d_model
    if fields.values.get("mamba_dt_rank") == "auto":
        fields.skip("mamba_dt_rank")
        rank = -(-d_model // 16)
    else:
        rank = fields.count("mamba_dt_rank")
    biases = inner if fields.flag("mamba_conv_bias", default=True) else 0
    if fields.flag("mamba_proj_bias"):
        biases += 2 * inner + d_model
    decays = inner * (state + 2)  # A, the skip D, and the biases of the time steps
    return StateSpace(
        d_model=d_model,
        d_inner=inner,
        d_state=state,
        kernel=fields.count("mamba_d_conv"),
        rank=rank,
        extra_parameters=decays + biases + rank + 2 * state,
    )


def short_convolution(fields: Fields, _family: Family, _kind: MixerKind) -> Mixer:
    """Return LFM2's gated short convolution."""
    d_model = fields.count(*WIDTH)
    fields.skip("conv_dim", "conv_dim_out")
    return ShortConvolution(
        d_model=d_model,
        kernel=fields.count("conv_L_cache"),
        biases=5 * d_model if fields.flag("conv_bias") else 0,
    )
