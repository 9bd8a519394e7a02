"""torch's own `clip_grad_norm_`, by the norm of all ranks' experts.

torch takes plain gradients for equal ones: each rank would clip by the norm of its own experts, and
the replicas of everything else would drift apart. Scripts import the function before there is a
layer, so that the norm is replaced that it calls. That is given gradients alone: parameters, of
which a rank may have no gradient while others do, are read from the caller's frame.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad

from moetune.comm.gloo import communicator_of
from moetune.domain.errors import InputError
from moetune.runtime.moe.local_parts import is_dtensor
from moetune.runtime.moe.placement import ExpertPlacement

_Placements = Callable[[], dict[int, ExpertPlacement]]
_CLIPS = inspect.unwrap(clip_grad.clip_grad_norm_).__code__


def sum_norms_over_ranks(placements: _Placements, of_parameters: _Placements) -> None:
    """Let torch's `clip_grad_norm_` sum the norms of experts over their ranks, from now on.

    A rank whose experts have no gradient takes part with none.

    Args:
        placements: gives those of the experts' gradients, by the id of a gradient.
        of_parameters: those of the experts' parameters, by their ids.
    """
    norm_of = clip_grad._get_total_norm  # noqa: SLF001 - torch has no hook here

    @functools.wraps(norm_of)
    @torch.no_grad()
    def total_norm(
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,  # noqa: FBT002 - torch's signature
        foreach: bool | None = None,
    ) -> torch.Tensor:
        grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        owners = placements() if grads else {}
        _check_meshes(grads, owners)
        parts: dict[Any, list[torch.Tensor]] = _without_gradients(of_parameters)
        for grad in grads:
            owner = None if is_dtensor(grad) else owners.get(id(grad))
            group = None if owner is None else owner.group
            parts.setdefault(group, []).append(grad)
        norms = [
            _over_ranks(norm_of(mine, norm_type, foreach=foreach), group, float(norm_type))
            for group, mine in parts.items()
        ]
        return norm_of(norms, norm_type, error_if_nonfinite, foreach)

    clip_grad._get_total_norm = total_norm  # noqa: SLF001


def _without_gradients(of_parameters: _Placements) -> dict[Any, list[torch.Tensor]]:
    """Return a zero for each group of experts that torch clips, of which none has a gradient here.

    Groups are in the order of the parameters, as on all ranks; those with gradients have no zero.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _CLIPS:
        frame = frame.f_back
    if frame is None:
        return {}
    clipped: list[nn.Parameter] = [*frame.f_locals["parameters"]]
    owners = of_parameters()
    groups: dict[Any, list[torch.Tensor]] = {}
    for parameter in clipped:
        owner = owners.get(id(parameter))
        if owner is None or owner.group is None or is_dtensor(parameter):
            continue
        zeros = groups.setdefault(owner.group, [parameter.new_zeros(())])
        if parameter.grad is not None:
            zeros.clear()
    return groups


def _check_meshes(grads: Iterable[torch.Tensor], owners: Mapping[int, ExpertPlacement]) -> None:
    """Raise InputError where experts and the rest are sharded over meshes that torch cannot mix."""
    sharded = [grad for grad in grads if is_dtensor(grad)]
    if len({grad.device_mesh for grad in sharded}) > 1 and any(
        id(grad) in owners for grad in grads
    ):
        raise InputError(
            "experts under FSDP2 are sharded over other ranks than the rest, and torch's "
            "clip_grad_norm_ takes one mesh",
            "use moetune.clip_grad_norm_(model, max_norm)",
        )


def _over_ranks(norm: torch.Tensor, group: Any, norm_type: float) -> torch.Tensor:  # noqa: ANN401
    """Return the norm over a group of ranks, each of which has one; None for this rank's alone."""
    if group is None:
        return norm
    communicator = communicator_of(group)
    norms = communicator.all_gather_values(norm, "the gradients' norms of all ranks")
    total: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    return total
