"""Which points to measure: what the layers asked for need, then a grid of sizes.

All sizes are spaced evenly on a logarithm, where costs bend (measuring.md, "Which fit?").
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from moetune.domain.errors import InputError
from moetune.domain.hardware import Cluster, DeviceKind
from moetune.domain.layer import ACTIVATIONS, LayerShape, Workload
from moetune.domain.samples import (
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmPoint,
    InterferencePoint,
    Point,
    Product,
    ResourceClass,
    RowsPoint,
)
from moetune.domain.units import dtype_bytes

Preset = Literal["quick", "full"]

IN_FLIGHT = 4
_PRODUCTS: tuple[Product, ...] = ("forward", "grad_input", "grad_weight")
_OPS: tuple[CollectiveOp, ...] = (
    "all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send",
)  # fmt: skip
_CLASSES: tuple[ResourceClass, ...] = ("comp", "comm", "mem")
_DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")
_MEMORY_SHARE = 8
_STAGED = 1
_NUM_EXPERTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Sizes of one preset on one kind of device."""

    degrees: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    row_divisors: tuple[int, ...]
    experts: tuple[int, ...]
    max_macs: int
    max_bytes: int
    bytes_step: int
    copy_bytes_step: int
    queued: tuple[CollectiveOp, ...]


_GRIDS: dict[tuple[Preset, DeviceKind], _Grid] = {
    ("quick", "cpu"): _Grid(
        degrees=(1, 4, 16, 64), shapes=((512, 1024),), row_divisors=(1, 16, 256), experts=(1, 2),
        max_macs=2**31, max_bytes=2**22, bytes_step=4, copy_bytes_step=8, queued=("all_to_all",),
    ),
    ("full", "cpu"): _Grid(
        degrees=(1, 2, 4, 8, 16, 32, 64), shapes=((256, 1024), (512, 2048), (1024, 4096)),
        row_divisors=(1, 4, 16, 64, 256, 1024), experts=(1, 2, 4),
        max_macs=2**34, max_bytes=2**26, bytes_step=2, copy_bytes_step=4, queued=_OPS,
    ),
    ("quick", "cuda"): _Grid(
        degrees=(1, 4, 16, 64), shapes=((1024, 4096), (2048, 8192)), row_divisors=(1, 8, 64, 512),
        experts=(1, 4), max_macs=2**39, max_bytes=2**28, bytes_step=4, copy_bytes_step=8,
        queued=("all_to_all",),
    ),
    ("full", "cuda"): _Grid(
        degrees=(1, 2, 4, 8, 16, 32, 64),
        shapes=((512, 2048), (1024, 4096), (2048, 8192), (4096, 14336)),
        row_divisors=(1, 2, 4, 8, 16, 32, 64, 256, 1024), experts=(1, 2, 4, 8),
        max_macs=2**40, max_bytes=2**30, bytes_step=2, copy_bytes_step=4, queued=_OPS,
    ),
}  # fmt: skip
# Of exchanges and computation side by side: what they lose has a constant and a rate.
_COMM_BYTES: dict[DeviceKind, tuple[int, ...]] = {
    "cpu": (2**14, 2**18, 2**22),
    "cuda": (2**18, 2**22, 2**26),
}
_SMALLEST_BYTES = 2**10
_SMALLEST_COPY_BYTES = 2**16


def default_group_sizes(world_size: int) -> tuple[int, ...]:
    """Return the divisors and the powers of two from 2 up to the world; (1,) for one rank."""
    sizes = [
        size
        for size in range(2, world_size + 1)
        if world_size % size == 0 or size & (size - 1) == 0
    ]
    return tuple(sizes) or (1,)


def choose_points(
    *,
    cluster: Cluster,
    dtypes: Sequence[str],
    group_sizes: Sequence[int],
    layers: Sequence[LayerShape] = (),
    preset: Preset = "quick",
    max_tokens: int = 4096,
) -> tuple[Point, ...]:
    """Return every point once, those that the layers need first.

    Args:
        group_sizes: ranks that talk to each other; 1 stands for a loopback through host memory
            in the place of a wire, for one CUDA device.
        layers: shapes whose products, payloads and row operations are covered exactly.
        max_tokens: tokens on one rank in one step.

    Raises:
        InputError: an unknown dtype, a group larger than the machine, or a layer whose experts
            divide by none of the group sizes.
    """
    world_size = cluster.machine.num_devices
    for size in group_sizes:
        if not 1 <= size <= world_size:
            raise InputError(
                f"group size {size} is not possible with {world_size} ranks",
                "start more ranks, or ask for smaller groups",
            )
    grid = _GRIDS[preset, cluster.machine.kind]
    linked = [size for size in group_sizes if size > 1 or cluster.machine.kind == "cuda"]
    workloads = [
        load
        for layer in layers
        for dtype in dtypes
        for load in _workloads(layer, dtype, group_sizes, max_tokens)
    ]
    chosen: list[Point] = [
        *_layer_points(workloads, linked, grid),
        *_interference(cluster.machine.kind, has_link=bool(linked)),
        *_gemm_grid(dtypes, max_tokens, grid, covered=bool(workloads)),
        *_collective_grid(linked, grid),
        *_copy_grid(cluster.machine.kind, grid),
    ]
    if not workloads:
        chosen += _rows_grid(dtypes, max_tokens, grid)
    limit = cluster.machine.memory_bytes // _MEMORY_SHARE
    return tuple(dict.fromkeys(point for point in chosen if memory_bytes(point) <= limit))


def _workloads(
    layer: LayerShape, dtype: str, group_sizes: Sequence[int], tokens: int
) -> list[Workload]:
    fitting = [size for size in group_sizes if layer.num_experts % size == 0]
    if not fitting:
        raise InputError(
            f"{layer.num_experts} experts divide by none of the group sizes "
            f"{', '.join(map(str, group_sizes))}",
            "use a multiple of the ranks, or ask for another group size",
        )
    return [
        Workload(layer=layer, world_size=size, tokens_per_rank=tokens, dtype=dtype)
        for size in fitting
    ]


def _layer_points(
    workloads: Sequence[Workload], linked: Sequence[int], grid: _Grid
) -> Iterator[Point]:
    for load in workloads:
        shape = (load.layer.d_model, load.layer.d_hidden)
        for degree in grid.degrees:
            rows = -(-load.rows // (degree * load.local_experts))
            for d_in, d_out in (shape, shape[::-1]):
                yield from _products(load.dtype, load.local_experts, rows, d_in, d_out)
        if load.world_size in linked:
            yield from _payloads(load, grid)
        yield from _layer_rows(load, grid)


def _payloads(load: Workload, grid: _Grid) -> Iterator[Point]:
    for degree in grid.degrees:
        share = load.payload_bytes // degree
        for in_flight in (1, IN_FLIGHT):
            yield _collective("all_to_all", load.world_size, share, in_flight)
    if load.world_size > _STAGED:
        size = load.tokens_per_rank * load.layer.d_model * dtype_bytes(load.dtype)
        yield _collective("all_reduce", load.world_size, size, 1)


def _layer_rows(load: Workload, grid: _Grid) -> Iterator[Point]:
    layer, dtype = load.layer, load.dtype
    for degree in grid.degrees[::2]:
        rows = max(load.rows // degree, 1)
        for op in (layer.activation, f"{layer.activation}_backward"):
            yield RowsPoint(op=op, dtype=dtype, rows=rows, width=layer.d_hidden)
        for op in ("gather", "scatter_add"):
            yield RowsPoint(op=op, dtype=dtype, rows=rows, width=layer.d_model)
        tokens = max(load.tokens_per_rank // degree, 1)
        for op in ("gate", "gate_backward"):
            yield RowsPoint(op=op, dtype=dtype, rows=tokens, width=layer.num_experts)


def _interference(kind: DeviceKind, *, has_link: bool) -> Iterator[Point]:
    classes = [name for name in _CLASSES if has_link or name != "comm"]
    for victim in classes:
        others = tuple(name for name in classes if name != victim)
        sets = {(), *((name,) for name in others), others}
        for beside in sorted(sets, key=lambda names: (len(names), names)):
            yield InterferencePoint(victim=victim, others=beside)
    if has_link:
        for comm_bytes in _COMM_BYTES[kind]:
            # The baseline again each time: computation drifts by more than an exchange takes.
            yield InterferencePoint(victim="comp", comm_bytes=comm_bytes)
            yield InterferencePoint(victim="comp", others=("comm",), comm_bytes=comm_bytes)
            yield InterferencePoint(victim="comm", others=("comp",), comm_bytes=comm_bytes)


def _gemm_grid(
    dtypes: Sequence[str], max_tokens: int, grid: _Grid, *, covered: bool
) -> Iterator[Point]:
    """Every shape with few and many rows; only forward where a layer's own are covered."""
    for dtype in dtypes:
        for d_model, d_hidden in grid.shapes:
            for experts in grid.experts:
                for divisor in grid.row_divisors:
                    rows = -(-max_tokens // (divisor * experts))
                    for d_in, d_out in ((d_model, d_hidden), (d_hidden, d_model)):
                        points = list(_products(dtype, experts, rows, d_in, d_out))
                        kept = points[:1] if covered else points
                        yield from (one for one in kept if one.macs <= grid.max_macs)


def _products(dtype: str, experts: int, rows: int, d_in: int, d_out: int) -> Iterator[GemmPoint]:
    for product in _PRODUCTS:
        yield GemmPoint(
            dtype=dtype, product=product, num_experts=experts, rows=rows, d_in=d_in, d_out=d_out
        )


def _collective_grid(linked: Sequence[int], grid: _Grid) -> Iterator[Point]:
    for size in linked:
        for op in _OPS if size > _STAGED else _OPS[:1]:
            step = grid.bytes_step if op == "all_to_all" else 2 * grid.bytes_step
            for num_bytes in _ladder(_SMALLEST_BYTES, grid.max_bytes, step):
                for in_flight in (1, IN_FLIGHT) if op in grid.queued else (1,):
                    yield _collective(op, size, num_bytes, in_flight)


def _collective(
    op: CollectiveOp, group_size: int, num_bytes: int, in_flight: int
) -> CollectivePoint:
    """Return the point, its bytes rounded up to a whole float for every rank."""
    step = 4 * group_size
    rounded = max(-(-num_bytes // step), 1) * step
    return CollectivePoint(op=op, group_size=group_size, num_bytes=rounded, in_flight=in_flight)


def _copy_grid(kind: DeviceKind, grid: _Grid) -> Iterator[Point]:
    """Host memory cannot be pinned to a CPU: there the pinned ones are all."""
    for num_bytes in _ladder(_SMALLEST_COPY_BYTES, 4 * grid.max_bytes, grid.copy_bytes_step):
        for direction in _DIRECTIONS:
            for pinned in (True, False) if kind == "cuda" else (True,):
                for both_ways in (False, True):
                    yield CopyPoint(
                        direction=direction, pinned=pinned, num_bytes=num_bytes,
                        both_ways=both_ways,
                    )  # fmt: skip


def _rows_grid(dtypes: Sequence[str], max_tokens: int, grid: _Grid) -> Iterator[Point]:
    narrow, wide = grid.shapes[-1]
    activations = [op for name in ACTIVATIONS for op in (name, f"{name}_backward")]
    widths = {**dict.fromkeys(activations, wide), "gather": narrow, "scatter_add": narrow,
              "gate": _NUM_EXPERTS, "gate_backward": _NUM_EXPERTS}  # fmt: skip
    for dtype in dtypes:
        for divisor in grid.row_divisors:
            rows = -(-max_tokens // divisor)
            for op, width in widths.items():
                yield RowsPoint(op=op, dtype=dtype, rows=rows, width=width)


def _ladder(smallest: int, largest: int, step: int) -> Iterable[int]:
    """Return sizes from the smallest to exactly the largest."""
    sizes = []
    size = largest
    while size >= smallest:
        sizes.append(size)
        size //= step
    if sizes[-1] != smallest:
        sizes.append(smallest)
    return reversed(sizes)


def memory_bytes(point: Point) -> int:
    """Return about how much memory the point's tensors take on one rank."""
    if isinstance(point, GemmPoint):
        elements = point.rows * (point.d_in + point.d_out) + point.d_in * point.d_out
        return point.num_experts * elements * dtype_bytes(point.dtype)
    if isinstance(point, RowsPoint):
        return 5 * point.elements * dtype_bytes(point.dtype)
    if isinstance(point, CollectivePoint):
        received = point.group_size if point.op == "all_gather" else 1
        return point.in_flight * point.num_bytes * (1 + received)
    if isinstance(point, CopyPoint):
        return 2 * point.num_bytes * (1 + point.both_ways)
    return 0
