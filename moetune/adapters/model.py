"""`adapt`: run a transformers model's experts through moetune's expert layer."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moetune.adapters.families import Family, family_of, is_experts
from moetune.adapters.input_weights import weigh_inputs
from moetune.adapters.saving import save_whole
from moetune.comm.gloo import communicator_of, shared_communicator
from moetune.comm.group import Communicator
from moetune.comm.launched import check_joined
from moetune.domain.errors import InputError, RankMismatchError
from moetune.domain.layer import LayerShape, check_divisible
from moetune.domain.plan import Plan
from moetune.runtime.moe.borrowed import BorrowedExperts
from moetune.runtime.moe.decisions import dtype_name
from moetune.runtime.moe.inputs import expert_group
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.routed_layer import RoutedLayer
from moetune.runtime.plans.book import PlanBook, plans_of

ModelT = TypeVar("ModelT", bound=nn.Module)
LAYER = "moetune"
"""Name of the layer in its module of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One module of experts in its block.

    Args:
        name: of the experts in the model.
    """

    name: str
    block: nn.Module
    experts: nn.Module
    family: Family
    shape: LayerShape


def adapt(
    model: ModelT,
    plan: Plan | PlanBook | str | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
) -> ModelT:
    """Make a transformers model's experts run in chunks over the ranks, and return it.

    Routers, shared experts and everything else stay the model's own. Experts are spread over the
    ranks, rank r of P keeping experts r·E/P … (r+1)·E/P − 1 of each layer; parameters keep their
    names, and are cut in place, before an optimizer is made. Every rank has tokens of its own.
    Gradients of experts are sums over all ranks' tokens: see `moetune.prepare_ddp`. State dicts
    have DTensors of all experts, and `save_pretrained`, which all ranks then call together, writes
    what it would write of the model before.

    Args:
        model: of transformers 5.20 or newer, equal on all ranks, which all call this.
        plan: of the model's expert layers, the path of a plan file, or a book of plans; None runs
            one chunk and reuses no memory.
        mesh: experts are spread over its last dimension, and a first one has their replicas;
            default all ranks.

    Raises:
        InputError: the model has no experts, or some of a class that is not supported; it is
            adapted already; the ranks do not divide the experts; the plan is for another layer,
            dtype or number of ranks; or the mesh has not this rank.
        RankMismatchError: the ranks have different models or plans, or only some can adapt theirs.
        CollectiveError: an exchange failed.
    """
    communicator = _communicator(mesh)
    found = _agreed(model, plan, communicator)
    layers = [_layer(each, plan, mesh, communicator) for each in found]
    for layer, _ in layers:
        layer.agree_on_plans()
    for each, (layer, experts) in zip(found, layers, strict=True):
        experts.keep_own()
        install(each.block, each.experts, layer, each.family)
    save_whole(model, communicator)
    return model


def install(block: nn.Module, experts: nn.Module, layer: RoutedLayer, family: Family) -> None:
    """Let a layer compute what a module of experts computes in its block."""
    experts.add_module(LAYER, layer)
    experts.forward = partial(_forward, layer)
    if family.weighs_inputs:
        block.forward = partial(weigh_inputs, block)


def _forward(
    layer: RoutedLayer,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    result: torch.Tensor = layer(hidden_states, top_k_index, top_k_weights)
    return result


def _communicator(mesh: DeviceMesh | None) -> Communicator:
    check_joined("the model")
    if mesh is None:
        return shared_communicator()
    if mesh.get_coordinate() is None:
        raise InputError(
            f"the mesh has ranks {mesh.mesh.flatten().tolist()}, this one is not among them",
            "call moetune.adapt on the mesh's ranks alone, or give a mesh of all",
        )
    return communicator_of(expert_group(mesh, None))


def _agreed(
    model: nn.Module,
    plan: Plan | PlanBook | str | os.PathLike[str] | None,
    communicator: Communicator,
) -> list[_Found]:
    """Return the model's experts, once all ranks have found the same.

    Raises:
        InputError: this model cannot be adapted, nor that of any other rank.
        RankMismatchError: models differ, or only some can be adapted; the same text on all ranks.
    """
    found: list[_Found] = []
    problem = None
    try:
        found = list(_found(model))
        if not found:
            raise InputError(  # noqa: TRY301 - told to all ranks
                f"{type(model).__name__} has no experts", "moetune.MoELayer is for your own models"
            )
        for each in found:
            check_divisible(each.shape.num_experts, communicator.num_ranks)
            _check_dtype(plan, dtype_name(_dtype(each)))
    except InputError as error:
        problem = error
    shown = "; ".join(sorted({f"{one.shape} in {dtype_name(_dtype(one))}" for one in found}))
    mine = f"{type(model).__name__} with {len(found)} layers of {shown}"
    told = communicator.all_gather_object(
        ("" if problem is None else problem.what, mine), "the comparison of models"
    )
    if problem is not None and all(what for what, _ in told):
        raise problem
    if any(what for what, _ in told) or len({each for _, each in told}) > 1:
        texts = (f"error: {what}" if what else each for what, each in told)
        lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        raise RankMismatchError(
            f"the ranks cannot adapt one model\n{lines}", "give every rank the same model and plan"
        )
    return found


def _found(model: nn.Module) -> Iterator[_Found]:
    """Yield the modules of experts.

    Raises:
        InputError: one is of an unknown class, or adapted already.
    """
    for prefix, block in model.named_modules():
        for name, experts in block.named_children():
            if not is_experts(experts):
                continue
            whole_name = f"{prefix}.{name}".strip(".")
            if hasattr(experts, LAYER):
                raise InputError(f"{whole_name} is adapted already", "call moetune.adapt once")
            family = family_of(experts)
            yield _Found(
                name=whole_name, block=block, experts=experts, family=family,
                shape=_shape(block, experts, family),
            )  # fmt: skip


def _shape(block: nn.Module, experts: nn.Module, family: Family) -> LayerShape:
    up: torch.Tensor = experts.get_parameter(family.names.up)
    num_experts, *sizes = up.shape
    d_model = sizes[1] if family.is_transposed else sizes[0]
    family.form(experts)  # before any rank goes on
    top_k = int(getattr(block, family.router).top_k)
    return LayerShape(
        d_model=d_model, d_hidden=up[0].numel() // (2 * d_model), num_experts=num_experts,
        top_k=1 if family.weighs_inputs else top_k, activation="swiglu",
    )  # fmt: skip


def _dtype(found: _Found) -> torch.dtype:
    return found.experts.get_parameter(found.family.names.up).dtype


def _check_dtype(plan: Plan | PlanBook | str | os.PathLike[str] | None, dtype: str) -> None:
    """Raise InputError unless a plan is for experts of this dtype, or under autocast for others.

    Raises:
        InputError: it is not, or it is no plan.
    """
    if plan is None or isinstance(plan, PlanBook):
        return
    plans = plans_of(plan)
    is_autocast = dtype == "float32"
    wanted = [one for one in plans if one.workload.dtype == dtype or is_autocast]
    if not wanted:
        dtypes = ", ".join(sorted({one.workload.dtype for one in plans}))
        raise InputError(
            f"plan {plans[0].id[:6]} is for {dtypes}, the experts are {dtype}",
            f"make one with `moetune plan --dtype {dtype}`",
        )


def _layer(
    found: _Found,
    plan: Plan | PlanBook | str | os.PathLike[str] | None,
    mesh: DeviceMesh | None,
    communicator: Communicator,
) -> tuple[RoutedLayer, BorrowedExperts]:
    """Return the layer of some experts, whose parameters are whole yet."""
    family = found.family
    placement = ExpertPlacement.of(communicator, found.shape.num_experts)
    experts = BorrowedExperts(found.experts, family.names, family.form(found.experts), placement)
    layer = RoutedLayer(
        found.shape, experts, communicator, mesh=mesh, pipeline=plan is not None,
        plan=None if isinstance(plan, PlanBook) else plan,
        planbook=plan if isinstance(plan, PlanBook) else None,
    )  # fmt: skip
    return layer, experts
