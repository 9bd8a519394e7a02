"""Grids of sizes to measure, spaced evenly on a logarithm, and points of these sizes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moetune.domain.cluster import DeviceKind, Group
from moetune.domain.layer import LayerShape
from moetune.domain.samples import CollectiveOp, CollectivePoint, GemmForm, GemmPoint, RowsPoint

Preset = Literal["quick", "full"]

IN_FLIGHT = 4
STAGED = 1
"""Size of the group whose one rank exchanges with itself, through host memory."""
OPS: tuple[CollectiveOp, ...] = (
    "all_to_all", "all_reduce", "all_gather", "reduce_scatter", "send",
)  # fmt: skip
SUSTAINED = "sustained_gemm"
"""Operation of a `RowsPoint` that shows the clock which a GPU keeps up."""
SUSTAINED_SECONDS = 2.0
_GEMM_FORMS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of one preset on one kind of device.

    Args:
        degrees: numbers of chunks into which a layer's tokens are cut.
        queued_degrees: those whose exchanges are in flight together.
        fractions: divisors of the largest micro-batch of a model.
        shapes: (d_model, d_hidden) of GEMMs.
        row_divisors: of the largest number of tokens, for the rows of GEMMs.
        experts: numbers of local experts of GEMMs.
        queued: collectives that are also measured with several in flight.
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


GRIDS = MappingProxyType[tuple[Preset, DeviceKind], Grid](
    {
        ("quick", "cpu"): Grid(
            degrees=(1, 4, 16, 64), queued_degrees=(3, 8, 24, 64),
            fractions=(1, 4, 16), shapes=((512, 1024),),
            row_divisors=(1, 16, 256), experts=(1, 2), max_macs=2**31, max_bytes=2**22,
            bytes_step=4, copy_bytes_step=8, queued=("all_to_all",),
        ),
        ("full", "cpu"): Grid(
            degrees=(1, 2, 4, 8, 16, 32, 64),
            queued_degrees=(3, 4, 6, 8, 12, 16, 24, 32, 64), fractions=(1, 2, 4, 8, 16),
            shapes=((256, 1024), (512, 2048), (1024, 4096)),
            row_divisors=(1, 4, 16, 64, 256, 1024), experts=(1, 2, 4),
            max_macs=2**34, max_bytes=2**26, bytes_step=2, copy_bytes_step=4, queued=OPS,
        ),
        ("quick", "cuda"): Grid(
            degrees=(1, 4, 16, 64), queued_degrees=(3, 8, 24, 64),
            fractions=(1, 4, 16), shapes=((1024, 4096), (2048, 8192)),
            row_divisors=(1, 8, 64, 512), experts=(1, 4), max_macs=2**39, max_bytes=2**28,
            bytes_step=4, copy_bytes_step=8, queued=("all_to_all",),
        ),
        ("full", "cuda"): Grid(
            degrees=(1, 2, 4, 8, 16, 32, 64),
            queued_degrees=(3, 4, 6, 8, 12, 16, 24, 32, 64), fractions=(1, 2, 4, 8, 16),
            shapes=((512, 2048), (1024, 4096), (2048, 8192), (4096, 14336)),
            row_divisors=(1, 2, 4, 8, 16, 32, 64, 256, 1024), experts=(1, 2, 4, 8),
            max_macs=2**40, max_bytes=2**30, bytes_step=2, copy_bytes_step=4, queued=OPS,
        ),
    }
)  # fmt: skip


def gemm_points(dtype: str, experts: int, rows: int, d_in: int, d_out: int) -> Iterator[GemmPoint]:
    """Yield a GEMM's three forms, forward first."""
    for product in _GEMM_FORMS:
        yield GemmPoint(
            dtype=dtype, product=product, num_experts=experts, rows=rows, d_in=d_in, d_out=d_out
        )


def rows_points(layer: LayerShape, dtype: str, *, rows: int, tokens: int) -> Iterator[RowsPoint]:
    """Yield a layer's memory-bound operations on rows of experts, and its gate's on tokens."""
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
    """Return the point, its bytes rounded up to a whole float for every rank."""
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
