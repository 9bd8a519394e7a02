"""The expert layer of one module of experts: its shape, its plan, and the layer itself."""

import os
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moetune.adapters.families import ExpertsFamily
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, check_divisible
from moetune.domain.plan import Plan
from moetune.runtime.moe.decisions import dtype_name
from moetune.runtime.moe.expert_module import BorrowedExperts
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.routed_layer import RoutedLayer
from moetune.runtime.plans.book import PlanBook, plans_of

AnyPlan: TypeAlias = Plan | PlanBook | str | os.PathLike[str] | None
"""A plan, a book of plans, the path of a plan file, or None for one chunk without reuse."""
_AUTOCAST = "bfloat16", "float16"
"""Dtypes of steps with float32 parameters."""


def shape_of(
    experts: nn.Module, family: ExpertsFamily, *, top_k: int, num_experts: int | None = None
) -> LayerShape:
    """Return the shape of all experts of a layer, as plans have it.

    Args:
        experts: parameters of all experts, or DTensors.
        top_k: of the router.
        num_experts: of all ranks, where the parameters may be this rank's.

    Raises:
        InputError: the runtime has not the experts' activation.
    """
    family.form(experts)
    up, down = (experts.get_parameter(name) for name in (family.names.up, family.names.down))
    inputs = 2 if family.is_transposed else 1
    return LayerShape(
        d_model=up.shape[inputs], d_hidden=down.shape[inputs],
        num_experts=len(up) if num_experts is None else num_experts,
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
    if any(planned.workload.dtype in fitting for planned in plans):
        return
    dtypes = ", ".join(sorted({planned.workload.dtype for planned in plans}))
    raise InputError(
        f"plan {plans[0].id[:6]} is for {dtypes}, the experts are {name}",
        f"make one with `moetune plan --dtype {name}`",
    )


def routed_layer(
    experts: nn.Module,
    family: ExpertsFamily,
    shape: LayerShape,
    plan: AnyPlan,
    communicator: Communicator,
    *,
    mesh: DeviceMesh | None = None,
    are_wrapped: bool = False,
) -> tuple[RoutedLayer, BorrowedExperts]:
    """Return the layer of a module's experts, which are not cut yet.

    Args:
        communicator: of the ranks that share the experts.
        mesh: the same ranks, or their replicas and them; None where nobody has made it.
        are_wrapped: the model's library cuts and wraps them itself.
    """
    placement = ExpertPlacement.of(communicator, shape.num_experts)
    form = family.form(experts)
    mine = BorrowedExperts(experts, family.names, form, placement, are_wrapped=are_wrapped)
    return RoutedLayer(shape, mine, communicator, plan=plan, mesh=mesh), mine


def wrapped_layer(
    experts: nn.Module,
    family: ExpertsFamily,
    shape: LayerShape,
    plan: AnyPlan,
    communicator: Communicator,
) -> RoutedLayer:
    """Return the layer of experts that another library cuts and wraps, once all ranks agree on it.

    Args:
        experts: the parameters are this rank's, or DTensors of all, whenever the layer runs.
        plan: as in `moetune.adapt`.
        communicator: of the ranks that share the experts, which all call this.

    Raises:
        InputError: the ranks do not divide the experts, or the plan is for another layer, dtype or
            number of ranks.
        RankMismatchError: the ranks have different plans, or only some can use theirs.
        CollectiveError: the exchange failed.
    """
    check_divisible(shape.num_experts, communicator.num_ranks)
    check_dtype(plan, dtype_of(experts, family))
    layer, _ = routed_layer(experts, family, shape, plan, communicator, are_wrapped=True)
    layer.agree_on_plans()
    return layer
