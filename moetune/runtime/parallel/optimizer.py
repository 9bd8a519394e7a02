"""After a backward pass: gradient sums that FSDP2 does not make, clipping, the optimizer's step."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator, OneRank
from moetune.domain.errors import InputError
from moetune.runtime.moe.optimizer_states import spread_parameters
from moetune.runtime.moe.placement import is_dtensor
from moetune.runtime.moe.total_norm import (
    clip_parts,
    gradient_parts,
    norm_of_parts,
    norm_over_ranks,
)
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.replicas import named_layers, owners_of

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes torch's optimizer for this rank's parameters, or for its shards of them."""
_MASTER_BYTES = 4
"""Parameters with fewer bytes per element are updated in float32 copies."""
_BY_ELEMENT = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class MasterOptimizer:
    """torch's optimizer for a rank's parameters, or for its shards of them.

    Two-byte parameters are updated in float32 copies, which only this optimizer has. It gets shards
    as plain tensors, because torch does not update DTensors and plain tensors in one call.

    Attributes:
        inner: torch's optimizer, whose learning rates a scheduler may change.

    Raises:
        InputError: parameters are sharded, and the optimizer does not work element by element.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], make: MakeOptimizer) -> None:
        self._parameters = parameters
        self._masters = [_master(parameter) for parameter in parameters]
        self.inner = make(self._masters)
        if isinstance(self.inner, _BY_ELEMENT) or not any(map(is_dtensor, parameters)):
            return
        names = ", ".join(kind.__name__ for kind in _BY_ELEMENT)
        raise InputError(
            f"{type(self.inner).__name__} with a ZeRO stage, which cuts parameters anywhere",
            f"use one of {names}, or zero 0",
        )

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters; all ranks call this together."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            grad = local_grad(parameter)
            master.grad = None if grad is None else grad.to(master.dtype)
        self.inner.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master.dtype != parameter.dtype:
                _local(parameter).copy_(master)


def local_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a parameter's gradient."""
    return None if parameter.grad is None else _local(parameter.grad)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    values = _local(parameter)
    if values.element_size() < _MASTER_BYTES:
        return nn.Parameter(values.float())
    return nn.Parameter(values) if is_dtensor(parameter) else parameter


def _local(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return value.to_local() if is_dtensor(value) else value.detach()


class SummedGradients:
    """The sums over ranks of the gradients of a rank's stages.

    Experts' gradients are summed over replicas: with all-to-alls they already sum over their
    group's tokens. All other gradients are summed over the ranks of a stage that have other tokens.
    A parameter without a gradient on this rank counts as zeros. Sums over micro-batches and ranks
    are in float32 at least.

    Args:
        parts: all of this rank's stages.
    """

    def __init__(
        self, parts: nn.ModuleList, ranks: ParallelGroups, parameters: Iterable[nn.Parameter]
    ) -> None:
        experts = owners_of(named_layers(parts))
        replicas, whole = map(communicator_of, (ranks.spread.get_group("replicas"), ranks.whole))
        self._summed: dict[Communicator, list[nn.Parameter]] = {replicas: [], whole: []}
        for parameter in parameters:
            if not is_dtensor(parameter):
                parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._summed[replicas if id(parameter) in experts else whole].append(parameter)

    def over_replicas(self) -> None:
        """Sum the gradients in place."""
        for ranks, parameters in self._summed.items():
            for parameter in parameters:
                if is_dtensor(parameter) and is_dtensor(parameter.grad):  # whole, or summands
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
                if parameter.grad is None and ranks.num_ranks > 1:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            grads = [local_grad(parameter) for parameter in parameters]
            summed = (grad for grad in grads if grad is not None)
            ranks.sum_in_place(summed, "the sum of the gradients")


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

    The norm is that of the whole model, of all ranks' experts and shards, and equal on all ranks.
    This works on one rank and under `prepare_ddp`, `prepare_fsdp` and `shard`; all ranks call it.

    Args:
        max_norm: largest 2-norm.

    Raises:
        InputError: the model is no module.
        CollectiveError: a rank left.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"clip_grad_norm_ was given a {type(model).__name__}, which does not tell which "
            "parameters are experts of one rank",
            "give it the model itself",
        )
    return clip_gradients(model, max_norm, OneRank())


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, stages: Communicator) -> torch.Tensor:
    """Scale all gradients of a model, or of a rank's stages, as `clip_grad_norm_` does.

    Args:
        stages: joins the ranks that have the other stages.
    """
    parts = gradient_parts(model.parameters(), spread_parameters())
    norm = norm_of_parts(parts, device=stages.device)
    norm = norm_over_ranks(norm, stages, 2.0)
    clip_parts(parts, norm, max_norm)
    return norm
