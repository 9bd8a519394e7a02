"""Where the chunks of a model live."""

from dataclasses import dataclass

import torch

from moetune.runtime.chunked.side_stream import SideStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where chunks live.

    Args:
        device: that computes.
        scale: of summed gradients: 1 / the ranks of the data-parallel group.
        pin: shards in host memory are page-locked.
        coming, leaving: where values come in and gradients go out.
    """

    device: torch.device
    scatter: bool
    offload: bool
    pin: bool
    scale: float
    coming: SideStream
    leaving: SideStream
