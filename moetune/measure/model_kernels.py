"""Operations of a model around its experts: attention, and the optimizer's step.

B sequences of S tokens, A heads of width D.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from moetune.domain.samples import AttentionPoint, RowsPoint
from moetune.measure.device import Device, drop, tensor_maker, torch_dtype


def attention(point: AttentionPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs attention once, or its three gradients.

    Query, key and value lie in one tensor, as one projection leaves them.
    """
    make = tensor_maker(device, point.dtype)
    heads_BS3AD = make(point.num_sequences, point.length, 3, point.num_heads, point.head_dim)
    inputs = [one.transpose(1, 2) for one in heads_BS3AD.unbind(2)]
    if not point.backward:
        return lambda: drop(_attend(inputs))
    for one in inputs:
        one.requires_grad_()
    result_BASD = _attend(inputs)
    grad_BASD = torch.ones_like(result_BASD)
    return lambda: _gradients(result_BASD, inputs, grad_BASD)


def _attend(inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def adam(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs a step of AdamW on one tensor, in one kernel."""
    make = tensor_maker(device, point.dtype)
    parameter = make(point.rows, point.width).requires_grad_()
    parameter.grad = make(point.rows, point.width)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return lambda: drop(optimizer.step())


def host_adam(point: RowsPoint, device: Device) -> Callable[[], None]:  # noqa: ARG001
    """Return a function that runs AdamW on the host's copy of a tensor, and casts the result.

    Of 2-byte parameters the copy and the optimizer states are in float32.
    """
    dtype = torch_dtype(point.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    shape = point.rows, point.width
    master = torch.rand(shape, dtype=wide).sub_(0.5).requires_grad_()
    master.grad = torch.rand(shape, dtype=wide).sub_(0.5)
    values = torch.zeros(shape, dtype=dtype)
    optimizer = torch.optim.AdamW([master], fused=True)

    def run() -> None:
        optimizer.step()
        if wide != dtype:
            values.copy_(master.detach())

    return run


def _gradients(result: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor) -> None:
    torch.autograd.grad(result, inputs, grad, retain_graph=True)
