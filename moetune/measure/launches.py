"""Layers so small that their time is that of the host, which launches their operations."""

from collections.abc import Callable

import torch

from moetune.comm.group import OneRank
from moetune.domain.samples import HOST_CHUNKS, HOST_WIDTH, RowsPoint
from moetune.measure.device import Device, drop, torch_dtype
from moetune.runtime.moe.layer import MoELayer

_NUM_EXPERTS = 2


def chunked_layer(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs a layer forward, or also backward in a "…_step".

    Args:
        point: its `rows` are the number of chunks.
    """
    dtype = torch_dtype(point.dtype)
    layer = MoELayer(
        HOST_WIDTH, HOST_WIDTH, _NUM_EXPERTS, pipeline=point.rows, communicator=OneRank(),
        device=device.torch_device, dtype=dtype,
    )  # fmt: skip
    size = HOST_CHUNKS[-1], HOST_WIDTH  # as small a batch as has the most chunks
    x_TD = torch.ones(size, dtype=dtype, device=device.torch_device, requires_grad=True)
    if not point.op.endswith("_step"):
        return lambda: drop(layer(x_TD))
    grad_TD = torch.ones_like(x_TD)
    return lambda: drop(layer(x_TD).backward(grad_TD))
