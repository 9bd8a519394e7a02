"""Recomputation: what a block computes again in its backward pass, by module as plans name it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Module = Callable[[torch.Tensor], torch.Tensor]


def computed_again(run: Callable[..., torch.Tensor], *inputs: object) -> torch.Tensor:
    """Return `run(*inputs)`, of which only the inputs are kept for the backward pass.

    That pass runs it again, with its exchanges, up to the last tensor that it needs.
    """
    if not torch.is_grad_enabled():
        return run(*inputs)
    y: torch.Tensor = checkpoint(run, *inputs, use_reentrant=False)
    return y


@dataclass(frozen=True, slots=True)
class _Output:
    """The norm's output, in a shape of its user's."""

    shape: Sequence[int]


def with_norm_again(norm: Module, then: Module, x: torch.Tensor) -> torch.Tensor:
    """Return `then(norm(x))`, and keep x in place of the norm's output.

    The backward pass computes the norm alone again, where `then` asks for its input; checkpointing
    both would run `then` again, with its exchanges.
    """
    y = norm(x)
    if not torch.is_grad_enabled():
        return then(y)
    place, size, wide = y.untyped_storage().data_ptr(), y.numel(), y.dtype
    kept, kind = x.detach(), x.device.type
    autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Output:
        is_output = tensor.untyped_storage().data_ptr() == place and tensor.numel() == size
        if not is_output or tensor.dtype != wide or not tensor.is_contiguous():
            return tensor
        return _Output(tuple(tensor.shape))

    def unpack(packed: torch.Tensor | _Output) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        enabled, dtype = autocast
        with torch.no_grad(), torch.autocast(kind, dtype, enabled=enabled):
            return norm(kept).view(packed.shape)

    with saved_tensors_hooks(pack, unpack):
        return then(y)
