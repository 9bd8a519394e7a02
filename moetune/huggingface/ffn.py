"""Dense FFNs and routed experts of a block, built from a configuration's fields."""

from moetune.domain.experts import DenseFfn, RoutedExperts, Router
from moetune.huggingface.family import Family, has_bias
from moetune.huggingface.fields import WIDTH, Fields

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


def routed_experts(fields: Fields, family: Family, at: int) -> RoutedExperts:
    """Return the experts of block `at`, counted from 0: lists have a value for each block.

    Raises:
        InputError: more experts are chosen than there are, or groups do not divide them.
    """
    d_model = fields.count(*WIDTH)
    experts = _of_block(fields, EXPERTS, at)
    top_k = _of_block(fields, TOP_K, at)
    width = _of_block(fields, family.expert_width, at)
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
        shared=_shared(fields, family, width),
        shared_gate=d_model if family.has_shared_gate else 0,
    )


def _latent_norms(fields: Fields, family: Family) -> int:
    """Return the norms of tokens of the latent width: on both sides of the experts, or behind."""
    if family.has_latent_norms:
        return 2
    return 1 if fields.has(*family.latent_width) and fields.flag("latent_moe_use_norm") else 0


def _router(fields: Fields, family: Family, *, d_model: int, experts: int) -> Router:
    groups = fields.count(*GROUPS, default=None if family.needs_groups else 1)
    every = experts + fields.count("zero_expert_num", default=0, least=0)
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
        parameters=every * (d_model + family.router_parameters)
        + (d_model if family.has_router_scale else 0),
        num_groups=groups,
        top_groups=min(groups, fields.count(*TOP_GROUPS, default=groups)),
        has_bias=family.is_balanced,
        is_normalized=fields.flag("norm_topk_prob", "moe_renormalize", default=True),
    )


def _shared(fields: Fields, family: Family, width: int) -> DenseFfn | None:
    if family.shared == "none":
        return None
    if family.shared == "one":
        for name in SHARED:
            fields.only(name, (1, [1] * len(_listed(fields, name))))
        return _ffn(fields, family, width)
    if family.shared in {"width", "optional_width"}:
        default = 0 if family.shared == "optional_width" else None
        stated = fields.count(*family.shared_width, default=default, least=0)
        return _ffn(fields, family, stated) if stated else None
    count = fields.or_null(*SHARED, null=0, least=0)
    if family.shared_width:
        width = fields.count(*family.shared_width, default=width)
    return _ffn(fields, family, count * width) if count else None


def _listed(fields: Fields, name: str) -> list[object]:
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


def _of_block(fields: Fields, names: tuple[str, ...], at: int) -> int:
    """Return a number, or the block's entry of a list of them."""
    for name in names:
        if isinstance(fields.values.get(name), list):
            listed = fields.of_layers(name, at + 1)
            return 1 if listed is None else fields.whole(name, listed[at])
    return fields.count(*names)
