"""A first look at the machine: what stands for each class, and rough speeds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from moetune.domain.hardware import DeviceKind
from moetune.domain.samples import CollectivePoint, CopyPoint, GemmPoint, Point
from moetune.measure.device import CpuDevice, Device
from moetune.measure.estimate import Rates
from moetune.measure.operations import Representatives
from moetune.measure.points import IN_FLIGHT, Preset
from moetune.measure.products import gemm
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
    comm = _all_to_all(num_bytes if large else _QUEUED_BYTES, world_size)
    if not large:
        comm = replace(comm, in_flight=IN_FLIGHT)
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
    for dtype in sorted({point.dtype for point in points if isinstance(point, GemmPoint)}):
        product = GemmPoint(dtype=dtype, rows=width, d_in=width, d_out=width)
        macs[dtype] = product.macs / seconds(product)
    copy = CopyPoint(direction="d2h", pinned=True, num_bytes=_LARGE_BYTES)
    wire_seconds, wire_rate = 0.0, 1e15
    if representatives.comm is not None:
        size = representatives.comm.group_size
        small, large = _all_to_all(_SMALL_BYTES, size), _all_to_all(_LARGE_BYTES, size)
        wire_seconds = seconds(small)
        wire_rate = large.num_bytes / max(seconds(large) - wire_seconds, 1e-7)
    return Rates(
        macs_per_second=macs,
        copy_bytes_per_second=copy.num_bytes / seconds(copy),
        wire_seconds=wire_seconds,
        wire_bytes_per_second=wire_rate,
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


def _all_to_all(num_bytes: int, group_size: int) -> CollectivePoint:
    step = 4 * group_size
    rounded = -(-num_bytes // step) * step
    return CollectivePoint(op="all_to_all", group_size=group_size, num_bytes=rounded)
