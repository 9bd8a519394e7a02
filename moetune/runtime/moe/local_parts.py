"""This rank's parts of parameters, whether or not these are DTensors."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Return whether a value is a DTensor, without importing them where nobody has made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's memory of a parameter, and its offsets in the whole."""
    if not is_dtensor(parameter):
        return parameter.detach(), (0,) * parameter.dim()
    (chunk,) = parameter.__create_chunk_list__()
    with torch.no_grad():
        local: torch.Tensor = parameter.to_local()
    return local, tuple(chunk.offsets)


def local_parts(parameter: torch.Tensor) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """Return this rank's memory of a parameter in parts of the whole, and their offsets in it."""
    if not is_dtensor(parameter):
        return [local_part(parameter)]
    from torch.distributed.checkpoint.metadata import MetadataIndex

    with torch.no_grad():
        return [
            (parameter.__get_tensor_shard__(MetadataIndex("", chunk.offsets)), tuple(chunk.offsets))
            for chunk in parameter.__create_chunk_list__()
        ]


def cut(whole: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return the part of a tensor at the offsets."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole
