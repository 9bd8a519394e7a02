"""Recurrent mixers and short convolutions of a block, built from a configuration's fields."""

from moetune.domain.architecture import Mixer
from moetune.domain.recurrent import GatedDeltaNet, LinearAttention, ShortConvolution, StateSpace
from moetune.huggingface.attention import head_dim
from moetune.huggingface.family import Family
from moetune.huggingface.fields import HEADS, WIDTH, Fields
from moetune.huggingface.kinds import MixerKind


def gated_delta(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return a gated delta net (Qwen3-Next, Qwen3.5)."""
    del family, kind
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
    """Return delta attention with a decay of each channel, and as many key heads as value heads."""
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


def kimi_delta(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return Kimi Delta Attention: decay of each channel and output gate of low rank."""
    del family, kind
    nested = fields.nested("linear_attn_config")
    inner, prefix = (fields, "linear_") if nested is None else (nested, "")
    heads, width = inner.count(f"{prefix}num_heads"), inner.count(f"{prefix}head_dim")
    inner.skip("gate_lower_bound")
    kernel = inner.count("short_conv_kernel_size", "linear_conv_kernel_dim", default=4)
    gate_width = heads * width if inner.flag("use_full_rank_gate") else 0
    return _delta(
        fields, heads=heads, width=width, kernel=kernel, gate_width=gate_width, gate_rank=width
    )


def bailing_delta(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return Ling's delta attention: decay and output gate are projected at full rank."""
    del family, kind
    fields.skip("kda_safe_gate", "short_conv_kernel_size")
    heads, width = fields.count("linear_num_heads"), fields.count("linear_head_dim")
    kernel = fields.count("linear_conv_kernel_dim", "short_conv_kernel_size")
    return _delta(fields, heads=heads, width=width, kernel=kernel, gate_width=2 * heads * width)


def lightning(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return lightning attention (MiniMax-Text-01): every head has its own keys and values."""
    del family, kind
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


def mamba2(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return a Mamba-2 mixer (Nemotron-H, Granite 4)."""
    del family, kind
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


def mamba1(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return a Mamba-1 mixer with norms of its time steps and states (Jamba)."""
    del family, kind
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


def short_convolution(fields: Fields, family: Family, kind: MixerKind) -> Mixer:
    """Return LFM2's gated short convolution."""
    del family, kind
    d_model = fields.count(*WIDTH)
    fields.skip("conv_dim", "conv_dim_out")
    return ShortConvolution(
        d_model=d_model,
        kernel=fields.count("conv_L_cache"),
        biases=5 * d_model if fields.flag("conv_bias") else 0,
    )
