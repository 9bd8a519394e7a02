"""Operations of a model around its experts: attention, norms, the loss, the optimizer's step.

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


def norm(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs a layer norm of a residual stream, and a sum with the stream."""
    x, weight, bias = _norm_inputs(point, device)
    out = torch.empty_like(x)

    def run() -> None:
        normed = functional.layer_norm(x, (point.width,), weight, bias)
        torch.add(x, normed, out=out)

    return run


def norm_backward(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that finds a norm's gradients, and their sum with the residual's."""
    inputs = _norm_inputs(point, device)
    for one in inputs:
        one.requires_grad_()
    x, weight, bias = inputs
    normed = functional.layer_norm(x, (point.width,), weight, bias)
    grad, out = torch.ones_like(normed), torch.empty_like(normed)

    def run() -> None:
        of_x, *_ = torch.autograd.grad(normed, inputs, grad, retain_graph=True)
        torch.add(of_x, grad, out=out)

    return run


def _norm_inputs(point: RowsPoint, device: Device) -> list[torch.Tensor]:
    make = tensor_maker(device, point.dtype)
    return [make(point.rows, point.width), make(point.width), make(point.width)]


def cross_entropy(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that finds the mean cross-entropy of rows of logits with a label each."""
    logits, labels = _logits_and_labels(point, device)
    return lambda: drop(functional.cross_entropy(logits, labels))


def cross_entropy_backward(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that finds the gradient of the logits."""
    logits, labels = _logits_and_labels(point, device)
    loss = functional.cross_entropy(logits.requires_grad_(), labels)
    one = torch.ones_like(loss)
    return lambda: _gradients(loss, [logits], one)


def _logits_and_labels(point: RowsPoint, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.arange(point.rows, device=device.torch_device) % point.width
    return tensor_maker(device, point.dtype)(point.rows, point.width), labels


def accumulate(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that adds gradients of parameters to those of an earlier micro-batch."""
    make = tensor_maker(device, point.dtype)
    total, gradient = make(point.rows, point.width), make(point.rows, point.width)
    return lambda: drop(total.add_(gradient))


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
