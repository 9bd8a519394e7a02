"""A first look at the machine: what stands for each class, and rough speeds."""

from collections.abc import Callable, Sequence

from moetune.domain.cluster import DeviceKind, Group
from moetune.domain.samples import (
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    Point,
)
from moetune.measure.device import CpuDevice, Device
from moetune.measure.estimate import Rates, Wire
from moetune.measure.expert_kernels import gemm
from moetune.measure.grid import IN_FLIGHT, Preset, collective
from moetune.measure.operations import Representatives
from moetune.measure.timing import FailedPointError, Timing

_SMALL_BYTES, _LARGE_BYTES = 2**12, 2**20
_QUEUED_BYTES = 2**18
_UNKNOWN_SECONDS = 1.0
_FAST = 0.8
_TRIES = 5


def representatives(device: Device, world_size: int) -> Representatives:
    """Return short operations, the same in every session.

    The link's is what a pipeline keeps on it: on a CPU a queue of small exchanges, which need
    a core, and soon, to go on at all. All ranks talk to each other; one CUDA device through
    host memory, one CPU not at all.
    """
    large = device.kind == "cuda"
    width = 4096 if large else 512
    dtype = "bfloat16" if large else "float32"
    num_bytes = 2**26 if large else 2**21
    comm = collective(
        "all_to_all",
        (world_size, 0),
        num_bytes if large else _QUEUED_BYTES,
        1 if large else IN_FLIGHT,
    )
    return Representatives(
        comp=GemmPoint(dtype=dtype, rows=2 * width, d_in=width, d_out=width),
        comm=comm if large or world_size > 1 else None,
        mem=CopyPoint(direction="d2h", pinned=True, num_bytes=num_bytes),
    )


def probe(
    points: Sequence[Point], representatives: Representatives, timed: Callable[[Point], Timing]
) -> Rates:
    """Return rough speeds from a handful of operations.

    Args:
        timed: measures a point in a moment; what fails with it counts as very slow.
    """

    def seconds(point: Point) -> float:
        try:
            return min(timed(point).seconds)
        except FailedPointError:
            return _UNKNOWN_SECONDS

    macs: dict[str, float] = {}
    width = min(representatives.comp.d_in, 2048)
    dtypes = {point.dtype for point in points if isinstance(point, (GemmPoint, AttentionPoint))}
    for dtype in sorted(dtypes):
        product = GemmPoint(dtype=dtype, rows=width, d_in=width, d_out=width)
        macs[dtype] = product.macs / seconds(product)
    copy = CopyPoint(direction="d2h", pinned=True, num_bytes=_LARGE_BYTES)
    groups = sorted({point.group for point in points if isinstance(point, CollectivePoint)})
    return Rates(
        macs_per_second=macs,
        copy_bytes_per_second=copy.num_bytes / seconds(copy),
        wires={group: _wire(group, seconds) for group in groups},
    )


def _wire(group: Group, seconds: Callable[[Point], float]) -> Wire:
    small, large = (collective("all_to_all", group, size) for size in (_SMALL_BYTES, _LARGE_BYTES))
    start_seconds = seconds(small)
    return Wire(
        seconds=start_seconds,
        bytes_per_second=large.num_bytes / max(seconds(large) - start_seconds, 1e-7),
    )


def default_dtypes(kind: DeviceKind, preset: Preset) -> tuple[str, ...]:
    """Return the element types to measure where none is asked for.

    A CPU's quick look takes float32 alone, a full one bfloat16 too where it is faster.
    """
    if kind == "cuda":
        half = ("float16",) if preset == "full" else ()
        return ("float32", "bfloat16", *half)
    if preset == "quick" or _product_seconds("bfloat16") > _FAST * _product_seconds("float32"):
        return ("float32",)
    return ("float32", "bfloat16")


def _product_seconds(dtype: str) -> float:
    device = CpuDevice()
    run = gemm(GemmPoint(dtype=dtype, rows=256, d_in=512, d_out=512), device)
    return min(device.seconds(run) for _ in range(_TRIES))
