"""`adapt`: run a transformers model's experts through moetune's expert layer."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moetune.adapters.layers import (
    ExpertsFamily,
    check_dtype,
    dtype_of,
    family_of,
    is_experts,
    routed_layer,
    shape_of,
)
from moetune.adapters.saving import load_checkpoint, teach_libraries
from moetune.comm.agree import agree
from moetune.comm.gloo import check_joined, communicator_of, shared_communicator
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, check_divisible
from moetune.runtime.moe.layer import RoutedLayer, expert_group
from moetune.runtime.moe.placement import is_dtensor
from moetune.runtime.plans.book import GivenPlan

ModelT = TypeVar("ModelT", bound=nn.Module)
_LAYER = "moetune"
"""The layer's name in its module of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertModule:
    """One module of experts in its block."""

    block: nn.Module
    experts: nn.Module
    family: ExpertsFamily
    shape: LayerShape


def adapt(
    model: ModelT,
    plan: GivenPlan = None,
    mesh: DeviceMesh | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
) -> ModelT:
    """Make a transformers model run its experts in chunks over the ranks, and return the model.

    Routers, shared experts and everything else stay unchanged. Rank r of P keeps experts r·E/P …
    (r+1)·E/P − 1 of each layer. Parameters keep their names and are cut in place: call this before
    you make an optimizer. Each rank has different tokens. Gradients of experts are sums over all
    ranks' tokens: see `moetune.prepare_ddp`. State dicts have DTensors of all experts. All ranks
    call `save_pretrained` together, which writes what it would write for the original model.

    Args:
        model: a model of transformers 5.20 or newer, equal on all ranks; all ranks call this.
        plan: a plan for the model's expert layers, the path of a plan file, or a plan book; None
            runs one chunk and reuses no memory.
        mesh: experts are spread over its last dimension; a first dimension has their replicas. The
            default is all ranks.
        checkpoint: a folder of safetensors, to fill a model that was built on the meta device; each
            rank reads only its experts.

    Raises:
        InputError: the model is no module, has no experts or experts of an unsupported class, or is
            adapted already; the ranks do not divide the experts; the plan is for another layer,
            dtype or number of ranks, or places experts; the mesh lacks this rank; the checkpoint is
            not the model's; or a model to fill has memory already.
        RankMismatchError: the ranks have different models or plans, or only some can adapt theirs.
        CollectiveError: an exchange failed.
    """
    return adapt_over(model, plan, _ranks_of(mesh), mesh=mesh, checkpoint=checkpoint)


def _ranks_of(mesh: DeviceMesh | None) -> Communicator:
    """Return the communicator of the ranks that share the experts; all of them call this."""
    check_joined("the model")
    if mesh is None:
        return shared_communicator()
    if mesh.get_coordinate() is None:
        raise InputError(
            f"the mesh has ranks {mesh.mesh.flatten().tolist()}, this rank is not among them",
            "call moetune.adapt on the mesh's ranks alone, or give a mesh of all",
        )
    return communicator_of(expert_group(mesh, None))


def adapt_over(
    model: ModelT,
    plan: GivenPlan,
    communicator: Communicator,
    *,
    mesh: DeviceMesh | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> ModelT:
    """Do what `adapt` does, over the ranks of an existing communicator.

    Raises:
        InputError, RankMismatchError, CollectiveError: as in `adapt`.
    """
    modules = agree(
        communicator,
        lambda: _usable(model, plan, checkpoint, communicator.num_ranks),
        _described,
        "the adapted model",
    )
    layers = [
        routed_layer(module.experts, module.family, module.shape, plan, communicator, mesh=mesh)
        for module in modules
    ]
    for layer, _ in layers:
        layer.agree_on_plans()
    for module, (layer, experts) in zip(modules, layers, strict=True):
        experts.keep_local()
        _install(module, layer)
    if checkpoint is not None:
        agree(
            communicator, lambda: load_checkpoint(model, checkpoint), lambda _: (), "the checkpoint"
        )
    for _, experts in layers:
        experts.mark_local()
    if communicator.num_ranks > 1:
        teach_libraries()
    return model


def _install(module: _ExpertModule, layer: RoutedLayer) -> None:
    """Make a layer compute what the module of experts computed in its block."""
    module.experts.add_module(_LAYER, layer)
    module.experts.forward = partial(_forward, layer)
    if module.family.weighs_inputs:
        module.block.forward = partial(_weigh_inputs, module.block)


def _forward(
    layer: RoutedLayer,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    result: torch.Tensor = layer(hidden_states, top_k_index, top_k_weights)
    return result


def _weigh_inputs(
    block: Any,  # noqa: ANN401 - a module of transformers
    hidden_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what Llama 4's block returns: its output (T, D), and the router's logits.

    Llama 4's router weights multiply the experts' inputs, and transformers gives every expert all
    tokens. Here each chosen (token, expert) pair becomes a token with that expert and the weight 1.
    """
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores_TE, logits_TE = block.router(x_TD)
    # Experts that were not chosen have the score 0.
    scores_TK, experts_TK = scores_TE.topk(block.router.top_k, dim=1)
    rows_TKD = x_TD.unsqueeze(1) * scores_TK.unsqueeze(2)
    routed = block.experts(
        rows_TKD.flatten(0, 1), experts_TK.reshape(-1, 1), torch.ones_like(scores_TK).view(-1, 1)
    )
    y_TD = block.shared_expert(x_TD) + routed.view_as(rows_TKD).sum(dim=1)
    return y_TD, logits_TE


def _usable(
    model: nn.Module, plan: GivenPlan, checkpoint: str | os.PathLike[str] | None, num_ranks: int
) -> Sequence[_ExpertModule]:
    """Return the model's experts; InputError if the plan or the checkpoint does not fit them."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(model).__name__} is no model",
            "give the model itself, such as AutoModelForCausalLM.from_pretrained(…)",
        )
    modules = list(_expert_modules(model))
    if not modules:
        raise InputError(
            f"{type(model).__name__} has no experts",
            "moetune.MoELayer is for models that you write",
        )
    for module in modules:
        _check_plain(module.experts)
        check_divisible(module.shape.num_experts, num_ranks)
        check_dtype(plan, dtype_of(module.experts, module.family))
    with_memory = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if checkpoint is not None and with_memory:
        raise InputError(
            f"{with_memory[0]} has memory, which a checkpoint would replace",
            'build the model under torch.device("meta")',
        )
    return modules


def _check_plain(experts: nn.Module) -> None:
    """Raise InputError if a wrapper has sharded the experts already."""
    for name, parameter in experts.named_parameters(recurse=False):
        if is_dtensor(parameter):
            raise InputError(
                f"{type(experts).__name__}.{name} is a DTensor already, sharded "
                f"{parameter.placements}",
                "call moetune.adapt, then moetune.prepare_fsdp(model, mesh), and fully_shard last",
            )


def _described(modules: Sequence[_ExpertModule]) -> list[str]:
    layers = {f"{module.shape} in {dtype_of(module.experts, module.family)}" for module in modules}
    return [f"{len(modules)} layers, {'; '.join(sorted(layers))}"]


def _expert_modules(model: nn.Module) -> Iterator[_ExpertModule]:
    """Yield the modules of experts; raise InputError if a class is unknown or already adapted."""
    for prefix, block in model.named_modules():
        for name, experts in block.named_children():
            if not is_experts(experts):
                continue
            if hasattr(experts, _LAYER):
                whole_name = f"{prefix}.{name}".strip(".")
                raise InputError(f"{whole_name} is adapted already", "call moetune.adapt once")
            family = family_of(experts)
            if not hasattr(block, family.router):
                raise InputError(
                    f"{type(experts).__name__} are wrapped by {type(block).__name__} already",
                    "call moetune.adapt before PEFT's get_peft_model, whose adapters of experts "
                    "train on one rank; on several, give it the attention's modules alone",
                )
            shape = shape_of(experts, family, top_k=int(getattr(block, family.router).top_k))
            yield _ExpertModule(block=block, experts=experts, family=family, shape=shape)
