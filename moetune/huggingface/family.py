"""Traits of a family of models: spellings of its fields, and what its classes do without a field."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moetune.domain.architecture import Mixer
from moetune.domain.experts import RouterScore
from moetune.huggingface.fields import Fields

MixerKind = Literal["full", "sliding", "chunked", "indexed", "linear", "compressed", "heavy", "conv"]
"""Kinds of a block's attention: `compressed` and `heavy` are DeepSeek-V4's two rates."""
MixerBuilder: TypeAlias = Callable[[Fields, "Family", MixerKind], Mixer]
Bias: TypeAlias = bool | str
"""Whether there are biases; the name of a flag that says so."""
Shared = Literal["none", "count", "width", "one", "always"]
"""Shared experts: a count of expert widths, a width, or one that is as wide as an expert; `always`
is a width that gives a dense FFN beside the experts in every block."""
Sparse = Literal["all", "first_dense", "qwen", "llama4", "ernie", "jamba", "none"]
"""Rule of the blocks with experts, where the configuration has no list of them."""
Kinds = Literal["full", "windowed", "qwen_window", "interval", "alternate", "period", "lightning",
                "kimi", "groups", "ratios", "global", "mamba", "jamba", "chunks", "lfm", "mimo",
                "gemma"]  # fmt: skip
"""Rule of the blocks' attention, where the configuration has no list of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a `model_type` means.

    Args:
        types: values of `model_type`.
        attention: builds the softmax attention of a block.
        linear: builds the blocks' other mixer, where there are two.
        qkv_bias, out_bias, mlp_bias: of projections; `out_bias` None is as `qkv_bias`.
        qk_norm: of queries and keys: of each head's width, of all heads', or none; the name of a
            flag that says whether there are norms of a head's width.
        gate: outputs of the attention's output gate: as wide as its output, one a head, or none.
        gate_flag: flag without which there is no such gate; "" where there always is.
        sinks: kinds of attention with learned sinks.
        dense_width, expert_width: spellings of the widths.
        shared_width: spellings of a shared expert's width; () for that of the routed ones.
        has_balance_bias: whether the router has a bias that balances the experts' loads.
        router_parameters: of a router beside its matrix, for each expert.
        expert_biases: whether experts have biases.
        norms: vectors of `d_model` in a block's norms.
        is_tied: `tie_word_embeddings` of the class.
        harmless: fields that change neither size nor cost here.
    """

    types: tuple[str, ...]
    attention: MixerBuilder
    linear: MixerBuilder | None = None
    kinds: Kinds = "full"
    sparse: Sparse = "all"
    qkv_bias: Bias = "attention_bias"
    out_bias: Bias | None = None
    mlp_bias: Bias = False
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_flag: str = ""
    gate: Literal["none", "full", "head"] = "none"
    gate_flag: str = ""
    sinks: tuple[MixerKind, ...] = ()
    dense_width: tuple[str, ...] = ("intermediate_size",)
    expert_width: tuple[str, ...] = ("moe_intermediate_size",)
    shared: Shared = "none"
    shared_width: tuple[str, ...] = ()
    has_shared_gate: bool = False
    score: RouterScore = "softmax"
    has_balance_bias: bool = False
    router_parameters: int = 0
    expert_biases: bool = False
    is_gated: bool = True
    norms: int = 2
    is_tied: bool = False
    harmless: tuple[str, ...] = ()
