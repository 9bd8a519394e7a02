"""Grids of sizes to measure, evenly spaced on a logarithmic scale, and points of these sizes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from moetune.domain.cluster import DeviceKind, Group
from moetune.domain.layer import ACTIVATIONS, LayerShape
from moetune.domain.samples import (
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmForm,
    GemmPoint,
    InterferencePoint,
    Point,
    ResourceClass,
    RowsPoint,
)

Preset = Literal["quick", "full"]

IN_FLIGHT = 4
STAGED = 1
"""The size of a group with one rank, which exchanges with itself through host memory."""
OPS: tuple[CollectiveOp, ...] = (
    "all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send",
)  # fmt: skip
_GEMM_FORMS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")
_CLASSES: tuple[ResourceClass, ...] = ("comp", "comm", "mem")
_DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")
_NEIGHBOURS = 2
_NUM_EXPERTS = 8
_SMALLEST_BYTES = 2**10
_SMALLEST_COPY_BYTES = 2**16
_LARGEST_COPY_BYTES = 2**28
_LARGE_ROWS, _LARGE_WIDTH = 8192, 4096
_ADAM_DIVISORS = (16, 4, 1)
_MAX_ADAM_ELEMENTS: Mapping[DeviceKind, int] = MappingProxyType({"cpu": 2**24, "cuda": 2**28})
_MAX_HOST_ADAM_ELEMENTS = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The sizes of a preset on a kind of device.

    Args:
        degrees: numbers of chunks into which a layer's tokens are cut.
        queued_degrees: the numbers of chunks whose exchanges are in flight together.
        fractions: divisors of the largest micro-batch of a model.
        shapes: (d_model, d_hidden) pairs of GEMMs.
        row_divisors: divisors of the largest number of tokens, for the rows of GEMMs.
        experts: numbers of local experts in GEMMs.
        queued: collectives that are also measured with several of them in flight.
    """

    degrees: tuple[int, ...]
    queued_degrees: tuple[int, ...]
    fractions: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    row_divisors: tuple[int, ...]
    experts: tuple[int, ...]
    max_macs: int
    max_bytes: int
    bytes_step: int
    copy_bytes_step: int
    queued: tuple[CollectiveOp, ...]


_QUICK = Grid(
    degrees=(1, 4, 16, 64), queued_degrees=(3, 8, 24, 64), fractions=(1, 4, 16),
    shapes=((512, 1024),), row_divisors=(1, 16, 256), experts=(1, 2), max_macs=2**31,
    max_bytes=2**22, bytes_step=4, copy_bytes_step=8, queued=("all_to_all",),
)  # fmt: skip
_FULL = Grid(
    degrees=(1, 2, 4, 8, 16, 32, 64), queued_degrees=(3, 4, 6, 8, 12, 16, 24, 32, 64),
    fractions=(1, 2, 4, 8, 16), shapes=((256, 1024), (512, 2048), (1024, 4096)),
    row_divisors=(1, 4, 16, 64, 256, 1024), experts=(1, 2, 4), max_macs=2**34,
    max_bytes=2**26, bytes_step=2, copy_bytes_step=4, queued=OPS,
)  # fmt: skip
GRIDS = MappingProxyType[tuple[Preset, DeviceKind], Grid]({
    ("quick", "cpu"): _QUICK,
    ("full", "cpu"): _FULL,
    ("quick", "cuda"): replace(
        _QUICK, shapes=((1024, 4096), (2048, 8192)), row_divisors=(1, 8, 64, 512), experts=(1, 4),
        max_macs=2**39, max_bytes=2**28,
    ),
    ("full", "cuda"): replace(
        _FULL, shapes=((512, 2048), (1024, 4096), (2048, 8192), (4096, 14336)),
        row_divisors=(1, 2, 4, 8, 16, 32, 64, 256, 1024), experts=(1, 2, 4, 8), max_macs=2**40,
        max_bytes=2**30,
    ),
})  # fmt: skip


def gemm_points(dtype: str, experts: int, rows: int, d_in: int, d_out: int) -> Iterator[GemmPoint]:
    """Yield a GEMM's three forms, forward first."""
    for product in _GEMM_FORMS:
        yield GemmPoint(
            dtype=dtype, product=product, num_experts=experts, rows=rows, d_in=d_in, d_out=d_out
        )


def rows_points(layer: LayerShape, dtype: str, *, rows: int, tokens: int) -> Iterator[RowsPoint]:
    """Yield a layer's memory-bound operations: on experts' rows, and the gate's on tokens."""
    for op, count, width in (
        (layer.activation, rows, layer.d_hidden), ("gather", rows, layer.d_model),
        ("gate", tokens, layer.num_experts),
    ):  # fmt: skip
        yield RowsPoint(op=op, dtype=dtype, rows=count, width=width)
        back = "scatter_add" if op == "gather" else f"{op}_backward"
        yield RowsPoint(op=back, dtype=dtype, rows=count, width=width)


def collective(
    op: CollectiveOp, group: Group, num_bytes: int, in_flight: int = 1
) -> CollectivePoint:
    """Return the point, with its bytes rounded up to whole floats for each rank."""
    group_size, num_nodes = group
    step = 4 * group_size
    return CollectivePoint(
        op=op,
        group_size=group_size,
        num_bytes=max(-(-num_bytes // step), 1) * step,
        in_flight=in_flight,
        num_nodes=num_nodes,
    )


def ladder(smallest: int, largest: int, step: int) -> Iterable[int]:
    """Return sizes from the smallest to exactly the largest."""
    sizes = []
    size = largest
    while size >= smallest:
        sizes.append(size)
        size //= step
    if sizes[-1] != smallest:
        sizes.append(smallest)
    return reversed(sizes)


def interference(*, has_link: bool) -> Iterator[Point]:
    """Yield each class of operations alone, with each other class, and with both.

    Args:
        has_link: whether there is a network link, or a loopback instead.
    """
    classes = [name for name in _CLASSES if has_link or name != "comm"]
    for victim in classes:
        disturbing = tuple(name for name in classes if name != victim)
        sets = {(), *((name,) for name in disturbing), disturbing}
        for background in sorted(sets, key=lambda names: (len(names), names)):
            yield InterferencePoint(victim=victim, others=background)


def large_product(dtypes: Sequence[str]) -> GemmPoint:
    """Return a product that reaches a GPU's highest rate, in the fastest of the dtypes."""
    dtype = next((name for name in ("bfloat16", "float16") if name in dtypes), dtypes[0])
    return GemmPoint(dtype=dtype, rows=_LARGE_ROWS, d_in=_LARGE_WIDTH, d_out=_LARGE_WIDTH)


def gemm_grid(
    dtypes: Sequence[str], max_tokens: int, grid: Grid, *, forward_only: bool
) -> Iterator[Point]:
    """Yield every shape with few and many rows, in the forward form only or in all three forms."""
    for dtype in dtypes:
        for d_model, d_hidden in grid.shapes:
            for experts in grid.experts:
                for divisor in grid.row_divisors:
                    rows = -(-max_tokens // (divisor * experts))
                    for d_in, d_out in ((d_model, d_hidden), (d_hidden, d_model)):
                        points = list(gemm_points(dtype, experts, rows, d_in, d_out))
                        wanted = points[:1] if forward_only else points
                        yield from (point for point in wanted if point.macs <= grid.max_macs)


def collective_grid(groups: Sequence[Group], grid: Grid) -> Iterator[Point]:
    """Yield every collective of every group in all sizes."""
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
    """Yield copies in both directions; a CPU pins no memory: there "pinned" is for both kinds."""
    # To pin a gigabyte takes as long as hundreds of copies.
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
    """Yield AdamW's step on few and many parameters.

    Its time also gives the rate of the device's memory: see `solve.model.machine`.
    """
    for dtype in dtypes:
        for op, most in adam_elements(kind).items():
            for divisor in _ADAM_DIVISORS:
                yield RowsPoint(op=op, dtype=dtype, rows=most // divisor, width=1)


def adam_elements(kind: DeviceKind) -> dict[str, int]:
    """Return the most elements of an AdamW step, on a GPU also for a step on the host's copy.

    Beyond that, the time is proportional to the number of elements.
    """
    most = {"adam": _MAX_ADAM_ELEMENTS[kind]}
    return most if kind == "cpu" else most | {"host_adam": _MAX_HOST_ADAM_ELEMENTS}
