"""Operations of an expert layer: its GEMMs, by the layer's own functions, and those around them.

E experts, N rows of all of them together, about equally many of each.
"""

from collections.abc import Callable
from itertools import accumulate, cycle

import torch

from moetune.domain.errors import InputError
from moetune.domain.layer import ACTIVATIONS, Activation
from moetune.domain.samples import GemmPoint, RowsPoint, even_form
from moetune.domain.units import dtype_bytes
from moetune.measure import model_kernels
from moetune.measure.device import Device, drop, tensor_maker
from moetune.runtime.moe.activations import activate
from moetune.runtime.moe.products import RowPart, add_product, blocks_of, has_grouped, multiply

_TOP_K = 2
_ROWS_BYTES, _MOST_ROWS = 2**26, 8
_WEIGHTS_BYTES = 2**28


def gemm(point: GemmPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs the GEMM once, on tensors that are already filled.

    On a CPU each run takes other operands than the one before, as within a layer: weights take
    turns, and chunks of rows come and go. The same ones every time were 5 to 15 % faster.
    """
    make = tensor_maker(device, point.dtype)
    num_weights, num_rows = _num_operands(point, device)
    total_rows = point.rows * point.num_experts
    weights = [make(point.num_experts, point.d_in, point.d_out) for _ in range(num_weights)]
    rows = [(make(total_rows, point.d_in), make(total_rows, point.d_out)) for _ in range(num_rows)]
    turns = cycle([(weight, *pair) for pair in rows for weight in weights])

    product, part = even_form(point.product), _part(point, rows[0][0], weights[0], device)

    def run() -> None:
        weight, x, y = next(turns)
        if product == "forward":
            multiply(x, weight, part, y if part.ends_E is None else None)
        elif product == "grad_input":
            multiply(y, weight.transpose(1, 2), part, x if part.ends_E is None else None)
        elif part.ends_E is not None:
            torch._grouped_mm(x.T, y, offs=part.ends_E)  # noqa: SLF001 - no public name in 2.10
        else:
            for expert, low, high in part.blocks:
                add_product(weight[expert], x[low:high].T, y[low:high], is_first=False)

    return run


def _part(point: GemmPoint, x: torch.Tensor, weights: torch.Tensor, device: Device) -> RowPart:
    """Return the experts' rows as the layer has them, with offsets for a grouped kernel."""
    blocks, ends_E = blocks_of([point.expert_rows]), None
    if has_grouped(x, weights):
        ends = torch.tensor(list(accumulate(point.expert_rows)), dtype=torch.int32)
        ends_E = ends.to(device.torch_device)
    return RowPart(rows=slice(0, len(x)), blocks=blocks, ends_E=ends_E)


def _num_operands(point: GemmPoint, device: Device) -> tuple[int, int]:
    """Return how many weights take turns, and how many pairs of input and output rows."""
    if device.kind == "cuda":
        return 1, 1  # its cache is flushed before each block
    elements = point.num_experts * point.rows * (point.d_in + point.d_out)
    num_rows = _ROWS_BYTES // (elements * dtype_bytes(point.dtype))
    return _num_weights(point), min(max(num_rows, 2), _MOST_ROWS)


def _num_weights(point: GemmPoint) -> int:
    """Return how many matrices a chunk goes through before it comes back to the first one.

    Backward it adds to both weights' gradients, too: with two matrices of 8 MiB, as many as caches
    held, gradients of 64 rows an expert took 2.2 ms, in a layer 3.2. Larger ones are in no cache.
    """
    if even_form(point.product) == "forward":
        return 2
    num_bytes = point.num_experts * point.d_in * point.d_out * dtype_bytes(point.dtype)
    return min(max(_WEIGHTS_BYTES // num_bytes, 2), 4)


def memory_bound_op(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs the operation once, on tensors that are already filled.

    Outputs go to buffers that are used again where the layer's do: fresh ones would measure page
    faults, which made relu's backward pass 20 times as slow. On a CPU several such sets of tensors
    take turns, as those of a GEMM.

    Raises:
        InputError: the operation is unknown.
    """
    row_bytes = 2 * point.elements * dtype_bytes(point.dtype)
    num_sets = min(max(_ROWS_BYTES // row_bytes, 1), _MOST_ROWS) if device.kind == "cpu" else 1
    runs = cycle([_memory_bound_op(point, device) for _ in range(num_sets)])

    def run() -> None:
        next(runs)()

    return run


def _memory_bound_op(point: RowsPoint, device: Device) -> Callable[[], None]:
    name = point.op.removesuffix("_backward")
    for activation in ACTIVATIONS:
        if name == activation:
            make = _activation if point.op == name else _activation_grad
            return make(point, device, activation)
    known = {
        "gather": _gather,
        "scatter_add": _scatter_add,
        "gate": _gate,
        "gate_backward": _gate_backward,
        "adam": model_kernels.adam,
        "host_adam": model_kernels.host_adam,
    }
    if point.op not in known:
        raise InputError(
            f"memory-bound operation {point.op!r} is unknown", f"known: {', '.join(known)}"
        )
    return known[point.op](point, device)


def _activation(point: RowsPoint, device: Device, name: Activation) -> Callable[[], None]:
    """act(x + b), or silu(x)·y for swiglu, which has no bias.

    On a CPU the bias is copied to every row first, for a GEMM to be added to it, as `addmm` does.
    """
    make = tensor_maker(device, point.dtype)
    x, y, bias = make(point.rows, point.width), make(point.rows, point.width), make(point.width)
    out = torch.empty_like(x)

    def run() -> None:
        if name != "swiglu":
            x.add_(bias) if x.is_cuda else x.copy_(bias)
        activate(x, y if name == "swiglu" else None, name, out)

    return run


def _activation_grad(point: RowsPoint, device: Device, name: Activation) -> Callable[[], None]:
    """grad·act'(x) and the bias's gradient; for swiglu both factors' gradients."""
    make = tensor_maker(device, point.dtype)
    x, grad, y = (make(point.rows, point.width) for _ in range(3))
    total, out = make(1, point.width), torch.empty_like(x)
    ones = torch.ones(1, point.rows, dtype=x.dtype, device=x.device)

    def run() -> None:
        if name == "swiglu":
            torch.ops.aten.silu.out(x, out=out).mul_(grad)
            torch.mul(grad, y, out=out)
            torch.ops.aten.silu_backward.grad_input(out, x, grad_input=out)
            return
        if name == "relu":
            torch.ops.aten.threshold_backward.grad_input(grad, x, 0, grad_input=out)
        elif name == "gelu":
            torch.ops.aten.gelu_backward.grad_input(grad, x, grad_input=out)
        else:
            torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)
        torch.mm(ones, out, out=total)

    return run


def _gather(point: RowsPoint, device: Device) -> Callable[[], None]:
    x, order = _rows_and_order(point, device)
    out = torch.empty_like(x)
    return lambda: drop(torch.index_select(x, 0, order, out=out))


def _scatter_add(point: RowsPoint, device: Device) -> Callable[[], None]:
    x, order = _rows_and_order(point, device)
    total = torch.zeros_like(x)
    return lambda: drop(total.index_add_(0, order, x))


def _gate(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Softmax in float32 and top-k over `width` experts."""
    logits = tensor_maker(device, "float32")(point.rows, point.width)
    top_k = min(_TOP_K, point.width)

    def run() -> None:
        torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1)

    return run


def _gate_backward(point: RowsPoint, device: Device) -> Callable[[], None]:
    make = tensor_maker(device, "float32")
    probabilities = torch.softmax(make(point.rows, point.width), dim=-1)
    top_k = min(_TOP_K, point.width)
    chosen = torch.topk(probabilities, top_k, dim=-1).indices
    grad = make(point.rows, top_k)

    def run() -> None:
        whole = torch.zeros_like(probabilities).scatter_(1, chosen, grad)
        torch.ops.aten._softmax_backward_data(  # noqa: SLF001 - autograd's own kernel
            whole, probabilities, -1, torch.float32
        )

    return run


def _rows_and_order(point: RowsPoint, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    x = tensor_maker(device, point.dtype)(point.rows, point.width)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(point.rows, generator=generator)
    return x, order.to(device.torch_device)
