"""Operations of layers and models, as functions that run them once on filled tensors.

GEMMs, activations and whole chunked layers are the runtime's functions. Operands change between
runs, because a layer's weights and rows come from memory: a whole model runs between two uses of a
matrix. Repeating an operation on the same tensors would read up to a cache's size of them from
cache.

E experts, N rows of all of them together; B sequences of S tokens, A heads of width D.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, cycle
from types import MappingProxyType

import torch
from torch.nn import functional

from moetune.comm.group import OneRank
from moetune.domain.errors import InputError
from moetune.domain.kernels import EXPERT_KERNELS, ExpertKernel
from moetune.domain.layer import ACTIVATIONS, Activation, Workload
from moetune.domain.samples import (
    HOST_CHUNKS,
    HOST_WIDTH,
    AttentionPoint,
    GemmPoint,
    RowsPoint,
    even_form,
)
from moetune.domain.units import dtype_bytes
from moetune.measure.device import Device, drop, tensor_maker, torch_dtype
from moetune.runtime.moe.activations import activate, derive
from moetune.runtime.moe.expert_kernels import grouped_kernel, kernel_problem
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.products import RowPart, multiply
from moetune.runtime.moe.weight_grads import GradientSum

_TOP_K = 2
_PARTS = 2
_ROWS_BYTES, _MOST_ROWS = 2**26, 8
_WEIGHTS_BYTES = 2**28
_CACHES = 2
_MOST_SETS = 64
_LAUNCH_EXPERTS = 2


def gemm(point: GemmPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs the GEMM once on filled tensors.

    On a CPU each run takes other operands than the previous run, as in a layer: weights take turns,
    and chunks of rows come and go. The same operands every time were 5 to 15 % faster.
    """
    make = tensor_maker(device, point.dtype)
    num_weights, num_rows = _num_operands(point, device)
    total_rows = point.rows * point.num_experts
    weights = [make(point.num_experts, point.d_in, point.d_out) for _ in range(num_weights)]
    rows = [(make(total_rows, point.d_in), make(total_rows, point.d_out)) for _ in range(num_rows)]
    product, part = even_form(point.product), _part(point, rows[0][0], device)
    is_grouped = part.ends_E is not None
    sums = [
        GradientSum(weight, _PARTS, dtype=weight.dtype, is_whole=is_grouped)
        for weight in weights if product == "grad_weight"
    ]  # fmt: skip
    operands = [(weight, *pair) for pair in rows for weight in sums or weights]
    turns = cycle(operands)

    def run() -> None:
        weight, x, y = next(turns)
        if isinstance(weight, GradientSum):
            weight.add_gemm(x, y, part)
        elif product == "forward":
            multiply(x, weight, part, None if is_grouped else y)
        else:
            multiply(y, weight.transpose(1, 2), part, None if is_grouped else x)

    return run


def _part(point: GemmPoint, x: torch.Tensor, device: Device) -> RowPart:
    """Return the experts' rows as in the layer, with offsets for a grouped kernel."""
    rows, widths = slice(0, len(x)), (point.d_in, point.d_out)
    kernel = grouped_kernel(point.kernel or None, x, widths)
    if kernel is None:
        return RowPart(rows=rows, rows_E=point.expert_rows)
    ends = torch.tensor(list(accumulate(point.expert_rows)), dtype=torch.int32)
    ends_E = ends.to(device.torch_device)
    return RowPart(rows=rows, rows_E=point.expert_rows, ends_E=ends_E, kernel=kernel)


def other_kernels(load: Workload, *, device: torch.device) -> tuple[ExpertKernel, ...]:
    """Return the kernels that can run a layer's experts on the device, except the default."""
    able = able_kernels(load, device=device)
    usual = "grouped_mm" if device.type == "cuda" and "grouped_mm" in able else "loop"
    return tuple(name for name in able if name != usual)


def able_kernels(load: Workload, *, device: torch.device) -> tuple[ExpertKernel, ...]:
    """Return the kernels that can run a layer's experts on the device."""
    dtype, widths = torch_dtype(load.dtype), (load.layer.d_model, load.layer.d_hidden)
    return tuple(
        name
        for name in EXPERT_KERNELS
        if not kernel_problem(name, device=device, dtype=dtype, widths=widths)
    )


def _num_operands(point: GemmPoint, device: Device) -> tuple[int, int]:
    """Return how many weights take turns, and how many pairs of input and output rows."""
    if device.kind == "cuda":
        return 1, 1  # sets of operands take turns there: see `in_turns`
    elements = point.num_experts * point.rows * (point.d_in + point.d_out)
    num_rows = _ROWS_BYTES // (elements * dtype_bytes(point.dtype))
    return _num_weights(point), min(max(num_rows, 2), _MOST_ROWS)


def _num_weights(point: GemmPoint) -> int:
    """Return the number of matrices that a chunk uses before it uses the first again.

    Backward it also adds to both weights' gradients. With two 8 MiB matrices, which caches hold,
    gradients of 64 rows per expert took 2.2 ms, in a layer 3.2 ms. No cache holds more.
    """
    if even_form(point.product) == "forward":
        return 2
    num_bytes = point.num_experts * point.d_in * point.d_out * dtype_bytes(point.dtype)
    return min(max(_WEIGHTS_BYTES // num_bytes, 2), 4)


def memory_bound_op(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs the operation once on filled tensors.

    Outputs go to reused buffers if the layer's do: fresh buffers would measure page faults, which
    made relu's backward pass 20 times slower. On a CPU several sets of tensors take turns, as for a
    GEMM.

    Raises:
        InputError: the operation is unknown.
    """
    make = _MAKERS.get(point.op)
    if make is None:
        raise InputError(
            f"memory-bound operation {point.op!r} is unknown", f"known: {', '.join(_MAKERS)}"
        )
    row_bytes = 2 * point.elements * dtype_bytes(point.dtype)
    num_sets = min(max(_ROWS_BYTES // row_bytes, 1), _MOST_ROWS) if device.kind == "cpu" else 1
    return _cycled([make(point, device) for _ in range(num_sets)])


def _activation(name: Activation, point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that computes act(x + b), or silu(x)·y for swiglu, which has no bias.

    On a CPU the bias is first copied to every row, as in `addmm`, which adds the GEMM to it.
    """
    make = tensor_maker(device, point.dtype)
    x, y, bias = make(point.rows, point.width), make(point.rows, point.width), make(point.width)
    out = torch.empty_like(x)

    def run() -> None:
        if name != "swiglu":
            x.add_(bias) if x.is_cuda else x.copy_(bias)
        activate(x, y if name == "swiglu" else None, name, out)

    return run


def _activation_grad(name: Activation, point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function for grad·act'(x) and the bias's gradient, or swiglu's two gradients."""
    make = tensor_maker(device, point.dtype)
    x, grad, y = (make(point.rows, point.width) for _ in range(3))
    total, out = make(1, point.width), torch.empty_like(x)
    ones = torch.ones(1, point.rows, dtype=x.dtype, device=x.device)

    def run() -> None:
        if name == "swiglu":
            activate(x, grad, name, out)
            torch.mul(grad, y, out=out)
            derive("silu", out, x, out)
        else:
            derive(name, grad, x, out)
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
    """Return a function for a float32 softmax and top-k over `width` experts."""
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
        torch.ops.aten._softmax_backward_data(  # noqa: SLF001 - autograd's kernel
            whole, probabilities, -1, torch.float32
        )

    return run


def _rows_and_order(point: RowsPoint, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    x = tensor_maker(device, point.dtype)(point.rows, point.width)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(point.rows, generator=generator)
    return x, order.to(device.torch_device)


def attention(point: AttentionPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs attention once, or computes its three gradients.

    Query, key and value are in one tensor, as a fused projection leaves them.
    """
    make = tensor_maker(device, point.dtype)
    heads_BS3AD = make(point.num_sequences, point.length, 3, point.num_heads, point.head_dim)
    inputs = [heads_BSAD.transpose(1, 2) for heads_BSAD in heads_BS3AD.unbind(2)]
    if not point.backward:
        return lambda: drop(_attend(inputs))
    for heads_BASD in inputs:
        heads_BASD.requires_grad_()
    result_BASD = _attend(inputs)
    grad_BASD = torch.ones_like(result_BASD)
    return lambda: _gradients(result_BASD, inputs, grad_BASD)


def _attend(inputs: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def _adam(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs an AdamW step on one tensor in one kernel."""
    make = tensor_maker(device, point.dtype)
    parameter = make(point.rows, point.width).requires_grad_()
    parameter.grad = make(point.rows, point.width)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return lambda: drop(optimizer.step())


def _host_adam(point: RowsPoint, device: Device) -> Callable[[], None]:  # noqa: ARG001
    """Return a function that runs AdamW on the host's copy of a tensor, and casts the result.

    For 2-byte parameters the copy and the optimizer states are in float32.
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


def chunked_layer(point: RowsPoint, device: Device) -> Callable[[], None]:
    """Return a function that runs a layer forward, and also backward for a "…_step" operation.

    Args:
        point: its `rows` is the number of chunks.
    """
    dtype = torch_dtype(point.dtype)
    layer = MoELayer(
        HOST_WIDTH, HOST_WIDTH, _LAUNCH_EXPERTS, pipeline=point.rows, communicator=OneRank(),
        device=device.torch_device, dtype=dtype,
    )  # fmt: skip
    size = HOST_CHUNKS[-1], HOST_WIDTH  # the smallest batch for the largest number of chunks
    x_TD = torch.ones(size, dtype=dtype, device=device.torch_device, requires_grad=True)
    if not point.op.endswith("_step"):
        return lambda: drop(layer(x_TD))
    grad_TD = torch.ones_like(x_TD)
    return lambda: drop(layer(x_TD).backward(grad_TD))


def num_sets(num_bytes: int, device: Device) -> int:
    """Return the number of tensor sets that fill the device's cache twice; 1 without a cache.

    Args:
        num_bytes: bytes of one set.
    """
    return min(max(-(-_CACHES * device.cache_bytes // max(num_bytes, 1)), 1), _MOST_SETS)


def in_turns(
    make: Callable[[], Callable[[], None]], *, num_bytes: int, device: Device
) -> Callable[[], None]:
    """Return a function that runs an operation on the next set of tensors each time.

    Args:
        make: allocates a set and returns the function that runs on it.
        num_bytes: bytes of one set.
    """
    return _cycled([make() for _ in range(num_sets(num_bytes, device))])


def _cycled(sets: list[Callable[[], None]]) -> Callable[[], None]:
    """Return a function that runs the next of several functions in each call."""
    runs = cycle(sets)

    def run() -> None:
        next(runs)()

    return run


_MAKERS: Mapping[str, Callable[[RowsPoint, Device], Callable[[], None]]] = MappingProxyType({
    **{name: partial(_activation, name) for name in ACTIVATIONS},
    **{f"{name}_backward": partial(_activation_grad, name) for name in ACTIVATIONS},
    "gather": _gather, "scatter_add": _scatter_add, "gate": _gate, "gate_backward": _gate_backward,
    "adam": _adam, "host_adam": _host_adam,
})  # fmt: skip
"""The memory-bound operations, by their names in points."""
