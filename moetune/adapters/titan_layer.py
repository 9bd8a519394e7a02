"""The expert layer of one of torchtitan's modules of experts; `torchtitan` puts it into a model.

Nothing of torchtitan is imported here: the parameters' names and layouts say which experts they
are.
"""

import torch.distributed as dist
from torch import nn

from moetune.adapters.layers import AnyPlan, check_dtype, routed_layer
from moetune.comm.gloo import communicator_of
from moetune.comm.group import OneRank
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, check_divisible
from moetune.runtime.moe.activations import ClampedGate, FusedForm
from moetune.runtime.moe.expert_module import ExpertNames
from moetune.runtime.moe.routed_layer import RoutedLayer

_THREE_MATRICES = ExpertNames(up="w1_EFD", down="w2_EDF", factor="w3_EFD")
_GPT_OSS = ExpertNames(
    up="mlp1_weight_EGD", down="mlp2_weight_EDF", up_bias="mlp1_bias_EG", down_bias="mlp2_bias_ED"
)
_GPT_OSS_ALPHA = 1.702


def titan_layer(
    experts: nn.Module, plan: AnyPlan, group: dist.ProcessGroup | None, *, top_k: int
) -> RoutedLayer:
    """Return the layer that runs a module's experts, once all ranks of the group agree on it.

    Args:
        experts: `GroupedExperts` or `GptOssGroupedExperts` with `num_experts` of all ranks; the
            parameters are this rank's, or DTensors of all, whenever the layer runs.
        plan: as in `moetune.adapt`.
        group: the expert-parallel ranks, which all call this; None is this rank alone.

    Raises:
        InputError: the ranks do not divide the experts, or the plan is for another layer, dtype or
            number of ranks.
        RankMismatchError: the ranks have different plans, or only some can use theirs.
        CollectiveError: the exchange failed.
    """
    communicator = OneRank() if group is None else communicator_of(group)
    names, form = _kind_of(experts)
    num_experts = int(experts.num_experts)  # type: ignore[arg-type]
    check_divisible(num_experts, communicator.num_ranks)
    up, down = experts.get_parameter(names.up), experts.get_parameter(names.down)
    check_dtype(plan, up.dtype)
    shape = LayerShape(
        d_model=up.shape[2], d_hidden=down.shape[2], num_experts=num_experts, top_k=top_k,
        activation="swiglu",
    )  # fmt: skip
    layer, _ = routed_layer(experts, names, form, shape, plan, communicator, are_wrapped=True)
    layer.agree_on_plans()
    return layer


def _kind_of(experts: nn.Module) -> tuple[ExpertNames, FusedForm | None]:
    """Return the names and the form of a module's parameters.

    Raises:
        InputError: they are of no known kind.
    """
    found = {name for name, _ in experts.named_parameters(recurse=False)}
    if found == set(_THREE_MATRICES.all):
        return _THREE_MATRICES, None
    if found == set(_GPT_OSS.all):
        limit = float(experts.swiglu_limit)  # type: ignore[arg-type]
        clamped = ClampedGate(alpha=_GPT_OSS_ALPHA, limit=limit)
        return _GPT_OSS, FusedForm(is_interleaved=True, is_transposed=True, clamped=clamped)
    raise InputError(
        f"{type(experts).__name__} has parameters {', '.join(sorted(found))}",
        "moetune runs torchtitan's GroupedExperts and GptOssGroupedExperts",
    )
