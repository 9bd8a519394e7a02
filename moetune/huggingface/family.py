"""Traits of a family of models: spellings of its fields, and what its classes do without them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from moetune.domain.architecture import Mixer
from moetune.domain.experts import RouterScore
from moetune.huggingface.fields import Fields
from moetune.huggingface.kinds import Flags, KindsRule, MixerKind, every_block, full

MixerBuilder: TypeAlias = Callable[[Fields, "Family", MixerKind], Mixer]
Bias: TypeAlias = bool | str
"""Whether there are biases; the name of a flag that says so."""
PREDICTIONS = (
    "num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers",
    "mtp_num_layers",
)  # fmt: skip
Shared = Literal["none", "count", "width", "optional_width", "one"]
"""Shared experts: a count of expert widths, a width (that may be absent: none), or one that is as
wide as an expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of a `model_type`, and the reader of their configurations.

    Args:
        name: its `model_type`.
        attention: builds the softmax attention of a block.
        kinds, sparse: rules of the kinds of attention, and of the blocks with experts.
        linear: builds the blocks' other mixer, where there are two.
        has_head_parameters: whether each head has a parameter more: a sink, or a gate's bias.
        needs_head_dim: whether heads have a width of the class's choice, not a share of `d_model`.
        needs_kv_heads: whether the class has another default than one key head a query head.
        needs_query_rank: whether the class knows low-rank queries; null is none.
        needs_groups: whether the class chooses among groups of experts without a field.
        qkv_bias, out_bias, mlp_bias: of projections; `out_bias` None is as `qkv_bias`.
        has_bias_by_default: `qkv_bias` of the class, where it is a flag that is absent.
        qk_norm: of queries and keys: of each head's width, of all heads', or none; the name of a
            flag that says whether there are norms of a head's width.
        gate: outputs of the attention's output gate: as wide as its output, one a head, or none.
        gate_flag: flag without which there is no such gate; "" where there always is.
        sinks: kinds of attention with learned sinks.
        dense_width, expert_width: spellings of the widths.
        dense_ratio: width of a dense FFN in widths of the model, where its field is null.
        shared_width: spellings of a shared expert's width; () for that of the routed ones.
        has_balance_bias: whether the router has a bias that balances the experts' loads; None for
            one with sigmoid scores alone.
        router_parameters: of a router beside its matrix, for each expert.
        has_router_scale: whether the router scales its input, width by width.
        has_dense_beside: whether blocks with experts have a dense FFN beside them, too.
        latent_width: spellings of the width of dispatched tokens.
        has_latent_norms: whether tokens of that width are normed on both sides of the experts.
        norms_of_experts: vectors of `d_model` in norms that only blocks with experts have.
        expert_biases: whether experts have biases.
        norms: vectors of `d_model` in a block's norms.
        has_norm_biases: whether norms have biases (LayerNorm); `norms` counts those of blocks.
        head_bias: of the head.
        predictions: spellings of the steps of multi-token prediction.
        positions: spellings of the number of learned positions; () for none.
        streams: how residual streams are mixed (hyper-connections): all with all, each with
            itself, or there is one.
        mixes_streams_at_end: whether they are mixed once more, before the last norm.
        is_tied: `tie_word_embeddings` of the class.
        has_residual_bank: whether blocks may weigh the residuals of earlier ones.
        has_ngrams: whether there may be tables of n-grams beside the embedding.
        has_shortcut: whether a block has two attentions and dense FFNs, and experts across them.
        has_pattern: whether a block is one part, of a pattern of letters or a list.
        only: fields that are read with these values alone: others would change sizes.
        harmless: fields that change neither size nor cost here, with spaces between.
    """

    name: str = ""
    attention: MixerBuilder
    linear: MixerBuilder | None = None
    kinds: KindsRule = full
    sparse: Flags = every_block
    has_head_parameters: bool = False
    needs_head_dim: bool = True
    needs_kv_heads: bool = True
    needs_query_rank: bool = True
    needs_groups: bool = False
    qkv_bias: Bias = "attention_bias"
    has_bias_by_default: bool = False
    out_bias: Bias | None = None
    mlp_bias: Bias = False
    qk_norm: Literal["none", "head", "full"] = "none"
    qk_norm_flag: str = ""
    gate: Literal["none", "full", "head"] = "none"
    gate_flag: str = ""
    sinks: tuple[MixerKind, ...] = ()
    dense_width: tuple[str, ...] = ("intermediate_size",)
    dense_ratio: int | None = None
    expert_width: tuple[str, ...] = ("moe_intermediate_size",)
    shared: Shared = "none"
    shared_width: tuple[str, ...] = ()
    has_shared_gate: bool = False
    score: RouterScore = "softmax"
    has_balance_bias: bool | None = None
    router_parameters: int = 0
    has_router_scale: bool = False
    has_dense_beside: bool = False
    latent_width: tuple[str, ...] = ("moe_latent_size",)
    has_latent_norms: bool = False
    norms_of_experts: int = 0
    expert_biases: bool = False
    is_gated: bool = True
    norms: int = 2
    has_norm_biases: bool = False
    head_bias: Bias = False
    predictions: tuple[str, ...] = PREDICTIONS
    positions: tuple[str, ...] = ()
    streams: Literal["one", "full", "diagonal"] = "one"
    mixes_streams_at_end: bool = True
    is_tied: bool = False
    has_residual_bank: bool = False
    has_ngrams: bool = False
    has_shortcut: bool = False
    has_pattern: bool = False
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    harmless: str = ""

    @property
    def is_balanced(self) -> bool:
        """Whether the router has a bias that balances the experts' loads."""
        has = self.has_balance_bias
        return self.score == "sigmoid" if has is None else has


def has_bias(fields: Fields, bias: Bias, *, default: bool = False) -> bool:
    """Return whether there are biases, by the family's rule or the configuration's flag."""
    return fields.flag(bias, default=default) if isinstance(bias, str) else bias
