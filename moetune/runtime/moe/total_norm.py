"""The norm of gradients that are spread over ranks: experts, and shards in DTensors.

torch's `clip_grad_norm_` takes plain gradients for replicas. Each rank would clip by the norm of
its experts, and the replicas of everything else would diverge. Scripts import the function before a
layer exists, so this replaces the inner norm function that it calls. That function gets only
gradients. Parameters, which may have a gradient on other ranks alone, are read from the caller's
frame.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import clip_grad

from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.runtime.moe.placement import is_dtensor

Spread: TypeAlias = list[tuple[nn.Parameter, dist.ProcessGroup]]
"""Experts' parameters, with the group over which the experts are spread."""
GradientParts: TypeAlias = dict[tuple[Communicator, ...], list[torch.Tensor]]
"""This rank's gradients, by the groups over which they are sharded."""
_CPU = torch.device("cpu")
_EPSILON = 1e-6
"""The value that is added to the norm, as torch does."""
_NORM = "the gradients' norms of all ranks"
_CLIPS = inspect.unwrap(clip_grad.clip_grad_norm_).__code__


def gradient_parts(parameters: Iterable[nn.Parameter], spread: Spread) -> GradientParts:
    """Return gradients by the groups over which they are sharded; all ranks have the same groups.

    Parameters determine the groups, so that a rank without gradients of its experts takes part in
    the norm. Each group's first gradient is a zero in float64.
    """
    owners = {id(parameter): group for parameter, group in spread}
    communicator, groups_of = functools.cache(communicator_of), functools.cache(_groups_of)
    parts: GradientParts = {}
    for parameter in parameters:
        grad, groups = parameter.grad, tuple[Communicator, ...]()
        cut = parameter if grad is None else grad
        if is_dtensor(cut):
            groups = groups_of(cut.device_mesh, cut.placements)
            grad = None if grad is None else cut.to_local()
        elif id(parameter) in owners:
            groups = (communicator(owners[id(parameter)]),)
        if groups not in parts:
            zero = torch.zeros((), dtype=torch.float64, device=parameter.device)
            parts[groups] = [zero]
        if grad is not None:
            parts[groups].append(grad)
    return parts


def norm_of_parts(
    parts: GradientParts, norm_type: float = 2.0, *, device: torch.device = _CPU
) -> torch.Tensor:
    """Return the norm of all ranks' gradients in float64; the groups' ranks call this together.

    Args:
        device: device of the result if there are no gradients.
    """
    norms = [_norm_over(groups, grads, norm_type) for groups, grads in parts.items()]
    norms = norms or [torch.zeros((), dtype=torch.float64, device=device)]
    return _norm([norm.to(norms[0].device) for norm in norms], norm_type)


def clip_parts(parts: GradientParts, norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients that have this norm to at most `max_norm`, per device and dtype at once."""
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1)
    grads = (grad for part in parts.values() for grad in part)
    for (device, dtype), some in _by_kind(grads).items():
        wide = scale.to(device, torch.promote_types(dtype, torch.float32))
        torch._foreach_mul_(some, wide)


def _by_kind(
    grads: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    return by_kind


def norm_over_ranks(norm: torch.Tensor, group: Communicator, norm_type: float) -> torch.Tensor:
    """Return the norm over a group, given each rank's norm."""
    total: torch.Tensor = torch.linalg.vector_norm(group.all_gather_values(norm, _NORM), norm_type)
    return total


def _norm_over(
    groups: Sequence[Communicator], grads: Sequence[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """Return the norm of gradients over the groups' ranks, in float64."""
    zero, *given = grads
    norms = [zero]
    for (_, dtype), some in _by_kind(given).items():
        wide = torch.promote_types(dtype, torch.float32)
        norm = _norm(torch._foreach_norm(some, norm_type, wide), norm_type)  # noqa: SLF001 - as torch clips
        norms.append(norm.to(zero))
    norm = _norm(norms, norm_type)
    for group in groups:
        norm = norm_over_ranks(norm, group, norm_type)
    return norm


def _norm(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([*norms]), norm_type, dtype=torch.float64
    )
    return total


def _groups_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Communicator, ...]:
    """Return the groups of the mesh's dimensions over which a DTensor is sharded."""
    dims = [dim for dim, cut in enumerate(placements) if not cut.is_replicate()]
    return tuple(communicator_of(mesh.get_group(dim)) for dim in dims)


def sum_norms_over_ranks(spread: Callable[[], Spread]) -> None:
    """Make torch's `clip_grad_norm_` take experts' norms over their ranks, from now on.

    Args:
        spread: returns the living parameters of experts.
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
        parameters, living = _clipped_parameters(), spread()
        mine = {id(parameter) for parameter, _ in living}
        experts = [parameter for parameter in parameters if id(parameter) in mine]
        if experts:
            _check_meshes(parameters)
        if all(map(is_dtensor, experts)):
            return norm_of(tensors, norm_type, error_if_nonfinite, foreach)
        norm = norm_of_parts(gradient_parts(parameters, living), float(norm_type))
        narrow = norm.to(torch.promote_types(experts[0].dtype, torch.float32))
        return norm_of([narrow], norm_type, error_if_nonfinite, foreach)

    clip_grad._get_total_norm = total_norm  # noqa: SLF001


def _clipped_parameters() -> list[nn.Parameter]:
    """Return the parameters that torch's `clip_grad_norm_` was given; [] outside of a call."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _CLIPS:
        frame = frame.f_back
    return [] if frame is None else [*frame.f_locals["parameters"]]


def _check_meshes(parameters: Iterable[nn.Parameter]) -> None:
    """Raise InputError if experts and other parameters have meshes that torch cannot mix."""
    grads = [parameter.grad for parameter in parameters]
    if len({grad.device_mesh for grad in grads if is_dtensor(grad)}) > 1:
        raise InputError(
            "experts under FSDP2 are sharded over other ranks than the rest, and torch's "
            "clip_grad_norm_ takes one mesh",
            "use moetune.clip_grad_norm_(model, max_norm)",
        )
