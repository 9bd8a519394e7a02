"""The expert layer of one module of experts, of transformers or of torchtitan.

Nothing of torchtitan is imported: the parameters' names and layouts say which experts they are.
"""

import os
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moetune.adapters.families import ExpertsFamily
from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator, OneRank
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, check_divisible
from moetune.domain.plan import Plan
from moetune.runtime.moe.activations import ClampedGate, FusedForm
from moetune.runtime.moe.decisions import dtype_name
from moetune.runtime.moe.expert_module import BorrowedExperts, ExpertNames
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.routed_layer import RoutedLayer
from moetune.runtime.plans.book import PlanBook, plans_of

AnyPlan: TypeAlias = Plan | PlanBook | str | os.PathLike[str] | None
"""A plan, a book of plans, the path of a plan file, or None for one chunk without reuse."""
_AUTOCAST = "bfloat16", "float16"
"""Dtypes of steps with float32 parameters."""
_THREE_MATRICES = ExpertNames(up="w1_EFD", down="w2_EDF", factor="w3_EFD")
_GPT_OSS = ExpertNames(
    up="mlp1_weight_EGD", down="mlp2_weight_EDF", up_bias="mlp1_bias_EG", down_bias="mlp2_bias_ED"
)
_GPT_OSS_ALPHA = 1.702


def shape_of(experts: nn.Module, family: ExpertsFamily, *, top_k: int) -> LayerShape:
    """Return the shape of all experts of a layer, as plans have it.

    Args:
        experts: parameters of all experts, or DTensors.
        top_k: of the router.

    Raises:
        InputError: the runtime has not the experts' activation.
    """
    family.form(experts)
    up = experts.get_parameter(family.names.up)
    num_experts, *sizes = up.shape
    d_model, d_both = reversed(sizes) if family.is_transposed else sizes
    return LayerShape(
        d_model=d_model, d_hidden=d_both // 2, num_experts=num_experts,
        top_k=1 if family.weighs_inputs else top_k, activation="swiglu",
    )  # fmt: skip


def dtype_of(experts: nn.Module, family: ExpertsFamily) -> torch.dtype:
    """Return the dtype of a module's experts."""
    return experts.get_parameter(family.names.up).dtype


def check_dtype(plan: AnyPlan, dtype: torch.dtype) -> None:
    """Raise InputError unless a plan is for experts of a dtype, or, under autocast, a narrower one.

    Raises:
        InputError: it is not, or it is no plan.
    """
    if plan is None or isinstance(plan, PlanBook):
        return
    plans, name = plans_of(plan), dtype_name(dtype)
    fitting = {name, *(_AUTOCAST if dtype == torch.float32 else ())}
    if any(one.workload.dtype in fitting for one in plans):
        return
    found = ", ".join(sorted({one.workload.dtype for one in plans}))
    raise InputError(
        f"plan {plans[0].id[:6]} is for {found}, the experts are {name}",
        f"make one with `moetune plan --dtype {name}`",
    )


def routed_layer(
    experts: nn.Module,
    names: ExpertNames,
    form: FusedForm | None,
    shape: LayerShape,
    plan: AnyPlan,
    communicator: Communicator,
    *,
    mesh: DeviceMesh | None = None,
    are_wrapped: bool = False,
) -> tuple[RoutedLayer, BorrowedExperts]:
    """Return the layer of a module's experts, which are not cut yet.

    Args:
        names, form: of the experts' parameters, as of `BorrowedExperts`.
        communicator: of the ranks that share the experts.
        mesh: the same ranks, or their replicas and them; None where nobody has made it.
        are_wrapped: the model's library cuts and wraps them itself.
    """
    placement = ExpertPlacement.of(communicator, shape.num_experts)
    own = BorrowedExperts(experts, names, form, placement, are_wrapped=are_wrapped)
    return RoutedLayer(shape, own, communicator, plan=plan, mesh=mesh), own


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
