"""Traits of a family of models: spellings of its fields, and defaults of its classes.

This module builds a block's dense FFN and routed experts from a configuration's fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from moetune.domain.architecture import Mixer
from moetune.domain.experts import DenseFfn, RoutedExperts, Router, RouterScore
from moetune.huggingface.fields import WIDTH, Fields
from moetune.huggingface.kinds import Flags, KindsRule, MixerKind, every_block, full

MixerBuilder: TypeAlias = Callable[[Fields, "Family", MixerKind], Mixer]
Bias: TypeAlias = bool | str
"""Whether there are biases, or the name of a flag that says so."""
PREDICTIONS = (
    "num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers",
    "mtp_num_layers",
)  # fmt: skip
Shared = Literal["none", "count", "width", "optional_width", "one"]
"""Shared experts: a count of expert widths, a width (which may be absent for none), or a single
expert as wide as a routed expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of a `model_type`, and the reader of their configurations.

    Args:
        name: the `model_type`.
        attention: builds the softmax attention of a block.
        kinds, sparse: rules for the kinds of attention, and for the blocks with experts.
        linear: builds the other mixer of the blocks; None where there is a single kind of mixer.
        has_head_parameters: whether each head has a further parameter: a sink, or a gate's bias.
        needs_head_dim: whether the default width of heads is not a share of `d_model`.
        needs_kv_heads: whether the class's default is not one key head for each query head.
        needs_query_rank: whether the class has low-rank queries by default; null means none.
        needs_groups: whether the class has groups of experts by default.
        qkv_bias, out_bias, mlp_bias: biases of projections; None in `out_bias` means `qkv_bias`.
        has_bias_by_default: value of `qkv_bias` where it is a flag that is absent.
        qk_norm: norms of queries and keys: over each head's width, over all heads, or none. The
            flag `qk_norm_flag`, if named, says whether there are norms.
        gate: outputs of attention's output gate: "full" as its output, "head" a number a head.
        gate_flag: flag that enables the gate; "" if there always is a gate.
        sinks: kinds of attention with learned sinks.
        dense_width, expert_width: spellings of the widths.
        dense_ratio: width of a dense FFN over the model's width, where its field is null.
        shared_width: spellings of a shared expert's width; () for the width of routed experts.
        has_balance_bias: whether the router has a bias that balances the experts' loads; None for
            a bias only with sigmoid scores.
        router_parameters: further parameters of a router for each expert, without its matrix.
        has_router_scale: whether the router scales its input elementwise.
        has_parallel_dense: whether blocks with experts also have a dense FFN.
        latent_width: spellings of the width of dispatched tokens.
        has_latent_norms: whether tokens of that width are normed on both sides of the experts.
        norms_of_experts: vectors of `d_model` in norms that only blocks with experts have.
        expert_biases: whether experts have biases.
        norms: vectors of `d_model` in a block's norms.
        has_norm_biases: whether norms have biases (LayerNorm); `norms` counts those of blocks.
        head_bias: bias of the head.
        predictions: spellings of the steps of multi-token prediction.
        positions: spellings of the number of learned positions; () for none.
        streams: how residual streams are mixed (hyper-connections): "full" for all with all,
            "diagonal" for each with itself, "one" for a single stream.
        mixes_streams_at_end: whether streams are mixed once more, before the last norm.
        is_tied: `tie_word_embeddings` of the class.
        has_residual_bank: whether blocks may weigh the residuals of earlier blocks.
        has_ngrams: whether there may be tables of n-grams next to the embedding.
        has_shortcut: whether a block has two attentions and dense FFNs, and experts in parallel.
        has_pattern: whether a block is a single part, by a pattern of letters or a list.
        only: fields with the only supported values: other values would change sizes.
        harmless: fields that change neither size nor cost in this family, separated by spaces.
        omitted: fields that its authors leave out, with the class's defaults.
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
    has_parallel_dense: bool = False
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
    omitted: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_balanced(self) -> bool:
        """Whether the router has a bias that balances the experts' loads."""
        has = self.has_balance_bias
        return self.score == "sigmoid" if has is None else has


def has_bias(fields: Fields, bias: Bias, *, default: bool = False) -> bool:
    """Return whether there are biases, by the family's rule or the configuration's flag."""
    return fields.flag(bias, default=default) if isinstance(bias, str) else bias


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    "top_k_experts", "experts_per_token",
)  # fmt: skip
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
GROUPS = ("n_group", "num_expert_group", "n_expert_groups", "num_expert_groups")
TOP_GROUPS = ("topk_group", "n_limited_groups", "num_limited_groups")
SCORES = (
    "scoring_func", "score_func", "score_function", "moe_router_activation",
    "moe_router_activation_func",
)  # fmt: skip
ACTIVATION = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function")


def dense_ffn(fields: Fields, family: Family) -> DenseFfn:
    """Return the FFN of a block without experts."""
    ratio = family.dense_ratio
    default = None if ratio is None else ratio * fields.count(*WIDTH)
    return _ffn(fields, family, fields.count(*family.dense_width, default=default))


def routed_experts(fields: Fields, family: Family, block: int) -> RoutedExperts:
    """Return the experts of a block, counted from 0; list fields have a value for each block.

    Raises:
        InputError: more experts are chosen than there are, or groups do not divide them.
    """
    d_model = fields.count(*WIDTH)
    experts = _of_block(fields, EXPERTS, block)
    top_k = _of_block(fields, TOP_K, block)
    width = _of_block(fields, family.expert_width, block)
    latent = fields.optional(*family.latent_width)
    matrices = 3 if family.is_gated else 2
    inner = latent or d_model
    return RoutedExperts(
        d_model=d_model,
        num_experts=experts,
        top_k=top_k,
        d_hidden=width,
        router=_router(fields, family, d_model=d_model, experts=experts),
        is_gated=family.is_gated,
        function=fields.text(*ACTIVATION, default="silu"),
        biases=(matrices - 1) * width + inner if family.expert_biases else 0,
        latent=latent,
        latent_biases=_latent_norms(fields, family) * (latent or 0),
        num_zero_experts=fields.count("zero_expert_num", default=0, least=0),
        shared=_shared_expert(fields, family, width),
        shared_gate=d_model if family.has_shared_gate else 0,
    )


def _latent_norms(fields: Fields, family: Family) -> int:
    """Return the number of norms of latent tokens: before and after the experts, after, or none."""
    if family.has_latent_norms:
        return 2
    return 1 if fields.has(*family.latent_width) and fields.flag("latent_moe_use_norm") else 0


def _router(fields: Fields, family: Family, *, d_model: int, experts: int) -> Router:
    groups = fields.count(*GROUPS, default=None if family.needs_groups else 1)
    num_choices = experts + fields.count("zero_expert_num", default=0, least=0)
    score = fields.text(*SCORES)
    if score and score not in {"softmax", "sigmoid", "sqrtsoftplus"}:
        fields.report(
            f"scoring_func {score!r} is not known", "known are softmax, sigmoid and sqrtsoftplus"
        )
        score = ""
    if fields.text("topk_method") == "greedy":
        groups = 1
    return Router(
        score=score or family.score,  # type: ignore[arg-type]
        parameters=num_choices * (d_model + family.router_parameters)
        + (d_model if family.has_router_scale else 0),
        num_groups=groups,
        top_groups=min(groups, fields.count(*TOP_GROUPS, default=groups)),
        has_bias=family.is_balanced or fields.text("topk_method") == "noaux_tc",
        is_normalized=fields.flag("norm_topk_prob", "moe_renormalize", default=True),
    )


def _shared_expert(fields: Fields, family: Family, width: int) -> DenseFfn | None:
    if family.shared == "none":
        return None
    if family.shared == "one":
        for name in SHARED:
            fields.only(name, (1, [1] * len(_list_of(fields, name))))
        return _ffn(fields, family, width)
    if family.shared in {"width", "optional_width"}:
        default = 0 if family.shared == "optional_width" else None
        stated = fields.count(*family.shared_width, default=default, least=0)
        return _ffn(fields, family, stated) if stated else None
    count = fields.or_null(*SHARED, null=0, least=0)
    if family.shared_width:
        width = fields.count(*family.shared_width, default=width)
    return _ffn(fields, family, count * width) if count else None


def _list_of(fields: Fields, name: str) -> list[object]:
    value = fields.values.get(name)
    return value if isinstance(value, list) else []


def _ffn(fields: Fields, family: Family, width: int) -> DenseFfn:
    d_model = fields.count(*WIDTH)
    has = has_bias(fields, family.mlp_bias)
    return DenseFfn(
        d_model=d_model,
        d_hidden=width,
        is_gated=family.is_gated,
        function=fields.text(*ACTIVATION, default="silu"),
        biases=((2 if family.is_gated else 1) * width + d_model) if has else 0,
    )


def _of_block(fields: Fields, names: tuple[str, ...], block: int) -> int:
    """Return a field's number, or the block's entry if the field is a list."""
    for name in names:
        if isinstance(fields.values.get(name), list):
            listed = fields.of_layers(name, block + 1)
            return 1 if listed is None else fields.whole(name, listed[block])
    return fields.count(*names)
