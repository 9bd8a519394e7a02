"""Whole blocks of a model, so small that starting their operations is all they take.

A block's products, norms and exchanges are measured one by one; what the host needs to start
the many small operations between them is measured here, on the runtime's own blocks.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from moetune.domain.samples import RowsPoint
from moetune.measure.device import Device, drop
from moetune.measure.operations import Makers
from moetune.runtime.language_model import Attention, Block, FeedForward
from moetune.runtime.layer import MoELayer
from moetune.runtime.links import LocalLink

_NUM_EXPERTS = 2


def block_makers() -> Makers:
    """Return what runs a block forward, or a step of it, by the name of its point."""
    return {
        "dense_block": partial(_forward, _dense),
        "dense_block_step": partial(_step, _dense),
        "moe_block": partial(_forward, _moe),
        "moe_block_step": partial(_step, _moe),
    }


def _dense(width: int) -> nn.Module:
    return FeedForward(width, width, LocalLink())


def _moe(width: int) -> nn.Module:
    return MoELayer(width, width, _NUM_EXPERTS, pipeline=False, link=LocalLink(), device="cpu")


def _block(
    make_ffn: Callable[[int], nn.Module], point: RowsPoint, device: Device
) -> tuple[Block, torch.Tensor]:
    attention = Attention(point.width, 1, LocalLink())
    block = Block(attention, make_ffn(point.width), point.width, balance=0.0)
    dtype = getattr(torch, point.dtype)
    x_BSD = torch.ones(1, point.rows, point.width, dtype=dtype, device=device.torch_device)
    return block.to(device.torch_device, dtype), x_BSD.requires_grad_()


def _forward(
    make_ffn: Callable[[int], nn.Module], point: RowsPoint, device: Device
) -> Callable[[], None]:
    block, x_BSD = _block(make_ffn, point, device)
    return lambda: drop(block(x_BSD))


def _step(
    make_ffn: Callable[[int], nn.Module], point: RowsPoint, device: Device
) -> Callable[[], None]:
    block, x_BSD = _block(make_ffn, point, device)
    grad_BSD = torch.ones_like(x_BSD)
    return lambda: drop(block(x_BSD).backward(grad_BSD))
