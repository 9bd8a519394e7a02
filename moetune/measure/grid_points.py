"""Points of a grid, for layers not known yet: products, exchanges, copies, and their losses."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from moetune.domain.cluster import DeviceKind, Group
from moetune.domain.layer import ACTIVATIONS, LayerShape
from moetune.domain.samples import (
    CopyPoint,
    Direction,
    GemmPoint,
    InterferencePoint,
    Point,
    ResourceClass,
    RowsPoint,
)
from moetune.measure.grid import (
    IN_FLIGHT,
    OPS,
    STAGED,
    SUSTAINED,
    Grid,
    collective,
    gemm_points,
    ladder,
    rows_points,
)

_CLASSES: tuple[ResourceClass, ...] = ("comp", "comm", "mem")
_DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")
_NEIGHBOURS = 2
_NUM_EXPERTS = 8
_SMALLEST_BYTES = 2**10
_SMALLEST_COPY_BYTES = 2**16
_LARGEST_COPY_BYTES = 2**28
_SUSTAINED_SHAPE = (8192, 4096)
_ADAM_DIVISORS = (16, 4, 1)
_MAX_ADAM_ELEMENTS: Mapping[DeviceKind, int] = MappingProxyType({"cpu": 2**24, "cuda": 2**28})
_MAX_HOST_ADAM_ELEMENTS = 2**26


def interference(*, has_link: bool) -> Iterator[Point]:
    """Yield each class of operations alone, beside each other one, and beside both.

    Args:
        has_link: there is a wire, or a loopback in its place.
    """
    classes = [name for name in _CLASSES if has_link or name != "comm"]
    for victim in classes:
        others = tuple(name for name in classes if name != victim)
        sets = {(), *((name,) for name in others), others}
        for others in sorted(sets, key=lambda names: (len(names), names)):
            yield InterferencePoint(victim=victim, others=others)


def sustained(dtypes: Sequence[str]) -> Iterator[Point]:
    """Yield a product for seconds, in the fastest of the dtypes, and the same in short blocks."""
    dtype = next((one for one in ("bfloat16", "float16") if one in dtypes), dtypes[0])
    rows, width = _SUSTAINED_SHAPE
    yield RowsPoint(op=SUSTAINED, dtype=dtype, rows=rows, width=width)
    yield GemmPoint(dtype=dtype, rows=rows, d_in=width, d_out=width)


def gemm_grid(
    dtypes: Sequence[str], max_tokens: int, grid: Grid, *, forward_only: bool
) -> Iterator[Point]:
    """Yield every shape with few and many rows; the forward form alone, or all three forms."""
    for dtype in dtypes:
        for d_model, d_hidden in grid.shapes:
            for experts in grid.experts:
                for divisor in grid.row_divisors:
                    rows = -(-max_tokens // (divisor * experts))
                    for d_in, d_out in ((d_model, d_hidden), (d_hidden, d_model)):
                        points = list(gemm_points(dtype, experts, rows, d_in, d_out))
                        wanted = points[:1] if forward_only else points
                        yield from (one for one in wanted if one.macs <= grid.max_macs)


def collective_grid(groups: Sequence[Group], grid: Grid) -> Iterator[Point]:
    """Yield every collective of every group, of all sizes in bytes."""
    for group in groups:
        size, num_nodes = group
        for op in OPS if size > STAGED else OPS[:1]:
            if op == "send" and num_nodes and size > _NEIGHBOURS:
                continue  # only neighbouring stages send: two ranks on two nodes are enough
            step = grid.bytes_step if op == "all_to_all" else 2 * grid.bytes_step
            for num_bytes in ladder(_SMALLEST_BYTES, grid.max_bytes, step):
                for in_flight in (1, IN_FLIGHT) if op in grid.queued else (1,):
                    yield collective(op, group, num_bytes, in_flight)


def copy_grid(kind: DeviceKind, grid: Grid) -> Iterator[CopyPoint]:
    """Yield copies both ways; a CPU does not pin memory: there "pinned" stands for both kinds."""
    # Page-locked memory of a gigabyte takes as long to get as hundreds of copies.
    largest = 4 * grid.max_bytes if kind == "cpu" else _LARGEST_COPY_BYTES
    for num_bytes in ladder(_SMALLEST_COPY_BYTES, largest, grid.copy_bytes_step):
        for direction in _DIRECTIONS:
            for pinned in (True, False) if kind == "cuda" else (True,):
                for both_ways in (False, True):
                    yield CopyPoint(
                        direction=direction, pinned=pinned, num_bytes=num_bytes,
                        both_ways=both_ways,
                    )  # fmt: skip


def rows_grid(dtypes: Sequence[str], max_tokens: int, grid: Grid) -> Iterator[Point]:
    """Yield the memory-bound operations of a layer with few and many rows."""
    narrow, wide = grid.shapes[-1]
    for activation in ACTIVATIONS:
        layer = LayerShape(
            d_model=narrow, d_hidden=wide, num_experts=_NUM_EXPERTS, activation=activation
        )
        for dtype in dtypes:
            for divisor in grid.row_divisors:
                rows = -(-max_tokens // divisor)
                yield from rows_points(layer, dtype, rows=rows, tokens=rows)


def optimizer_grid(dtypes: Sequence[str], kind: DeviceKind) -> Iterator[Point]:
    """Yield AdamW's step on few and many parameters, on a GPU also on the host's copy of them.

    Its time tells the rate of the device's memory, too: see `solve.training.machine`.
    """
    most = {"adam": _MAX_ADAM_ELEMENTS[kind], "host_adam": _MAX_HOST_ADAM_ELEMENTS}
    for dtype in dtypes:
        for op in ("adam", "host_adam") if kind == "cuda" else ("adam",):
            for divisor in _ADAM_DIVISORS:
                yield RowsPoint(op=op, dtype=dtype, rows=most[op] // divisor, width=1)
