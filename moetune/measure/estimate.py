"""Estimates before measuring: a first probe of the machine, and the time of each visit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moetune.domain.cluster import DeviceKind, Group
from moetune.domain.costs import LinearCost
from moetune.domain.samples import (
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
    StepPoint,
)
from moetune.domain.units import dtype_bytes
from moetune.measure.device import Device
from moetune.measure.grid import IN_FLIGHT, Preset, collective
from moetune.measure.operations import Bench, Representatives
from moetune.measure.sizes import memory_bytes
from moetune.measure.timing import (
    NUM_STREAM_BLOCKS,
    OVERLAPPED_SECONDS,
    STREAM_BLOCK_SECONDS,
    TURNS_IN_WINDOW,
    Effort,
    FailedPointError,
    Timing,
)

_AGREEMENT_SECONDS = 2e-3
_BLOCKS_TO_SETTLE = 2
# Warm-up lasts until two blocks in a row agree. Noise may extend it to its limit.
_WARM_UP_BLOCKS = 6
# This includes the blocks of the warm-up.
_OVERLAPPED_BLOCKS = 5
_STREAM_BLOCKS = NUM_STREAM_BLOCKS + 3
# Random numbers are drawn once for each tensor: a core draws a few hundred million per second, as
# does the core that writes each page of the host's memory once.
_FILL_BYTES_PER_SECOND: Mapping[DeviceKind, float] = MappingProxyType({"cpu": 1e9, "cuda": 2e11})
# The time to allocate tensors, and to issue the timed work.
_START_SECONDS: Mapping[DeviceKind, float] = MappingProxyType({"cpu": 0.0, "cuda": 0.02})
_SMALL_BYTES, _LARGE_BYTES = 2**12, 2**20
_QUEUED_BYTES = 2**18
_UNKNOWN_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rough speeds of the machine from a first probe.

    Args:
        macs_per_second: multiply-accumulates per second, by dtype.
        wires: costs of all-to-alls in each measured group, by one rank's input bytes.
        kind: kind of the device.
    """

    macs_per_second: Mapping[str, float]
    copy_bytes_per_second: float
    wires: Mapping[Group, LinearCost]
    kind: DeviceKind = "cpu"

    def wire_seconds(self, group: Group, num_bytes: float, in_flight: int = 1) -> float:
        """Return the rough time of all-to-alls that are issued together."""
        return in_flight * self.wires[group].seconds(num_bytes)


def operation_seconds(point: Point, rates: Rates) -> float:
    """Return the rough time of a run of the point's operation.

    For interference it is the time of the exchanges that are under way together.
    """
    match point:
        case GemmPoint() | AttentionPoint():
            seconds = point.macs / rates.macs_per_second[point.dtype]
        case RowsPoint():
            seconds = 5 * point.elements * dtype_bytes(point.dtype) / rates.copy_bytes_per_second
        case CollectivePoint():
            times = {"all_reduce": 2, "all_gather": point.group_size}.get(point.op, 1)
            seconds = rates.wire_seconds(point.group, times * point.num_bytes, point.in_flight)
        case CopyPoint():
            seconds = point.num_bytes / rates.copy_bytes_per_second * (1 + point.both_ways)
        case InterferencePoint() if point.comm_bytes and rates.wires:
            slowest = max(rates.wires, key=lambda group: rates.wires[group].alpha_seconds)
            seconds = rates.wire_seconds(
                slowest, point.comm_bytes, 1 if point.is_alone else IN_FLIGHT
            )
        case StepPoint():
            seconds = _step_seconds(point, rates)
        case _:
            seconds = 0.0
    return seconds


def _step_seconds(point: StepPoint, rates: Rates) -> float:
    """Return the rough time of a layer's step, without overlap of experts and exchanges."""
    load = point.workload
    gemms = 3 * load.layer.num_gemms * load.macs / rates.macs_per_second[load.dtype]
    if load.world_size == 1:
        return gemms
    share = load.payload_bytes / point.degree
    return gemms + 4 * rates.wire_seconds(point.group, share, point.degree)


def visit_seconds(point: Point, rates: Rates, effort: Effort) -> float:
    """Return the rough time of a visit of the point, including its preparation."""
    once = operation_seconds(point, rates)
    if isinstance(point, InterferencePoint):
        blocks_seconds = _OVERLAPPED_BLOCKS * TURNS_IN_WINDOW * once
        longest = max(effort.max_seconds, OVERLAPPED_SECONDS, blocks_seconds)
        return _warm_up_seconds(effort, once, rates.kind) + longest
    fill_rate = _FILL_BYTES_PER_SECOND["cpu" if isinstance(point, CopyPoint) else rates.kind]
    filling = _START_SECONDS[rates.kind] + memory_bytes(point) / fill_rate
    if isinstance(point, CollectivePoint):
        return filling + _STREAM_BLOCKS * max(once, STREAM_BLOCK_SECONDS)
    block = max(once, effort.block_seconds) + _AGREEMENT_SECONDS
    blocks_seconds = min(_BLOCKS_TO_SETTLE * effort.min_blocks * block, effort.max_seconds)
    return filling + _warm_up_seconds(effort, block, rates.kind) + max(blocks_seconds, 3 * block)


def _warm_up_seconds(effort: Effort, block_seconds: float, kind: DeviceKind) -> float:
    """Return the rough time of a warm-up; a CPU's blocks hardly ever agree before the limit."""
    blocks = 2 if kind == "cpu" else _WARM_UP_BLOCKS
    shortest = effort.warmup_seconds if kind == "cpu" else 0.0
    return max(shortest, blocks * max(block_seconds, effort.block_seconds))


def representatives(device: Device, world_size: int) -> Representatives:
    """Return a short operation of each resource class, the same in every session.

    Communication is the traffic that a pipeline keeps on the link: on a CPU a queue of small
    exchanges, which progress only when they get a core. It is among all ranks. A single CUDA device
    copies through host memory, and a single CPU has no communication.
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


def probe(points: Sequence[Point], bench: Bench, timed: Callable[[Point], Timing]) -> Rates:
    """Return rough speeds from a few operations.

    Args:
        timed: measures a point quickly; points that fail count as very slow.
    """

    def seconds(point: Point) -> float:
        try:
            return min(timed(point).seconds)
        except FailedPointError:
            return _UNKNOWN_SECONDS

    macs: dict[str, float] = {}
    width = min(bench.representatives.comp.d_in, 2048)
    dtypes = {point.dtype for point in points if isinstance(point, (GemmPoint, AttentionPoint))}
    dtypes |= {point.workload.dtype for point in points if isinstance(point, StepPoint)}
    for dtype in sorted(dtypes):
        square = GemmPoint(dtype=dtype, rows=width, d_in=width, d_out=width)
        macs[dtype] = square.macs / seconds(square)
    copy = CopyPoint(direction="d2h", pinned=True, num_bytes=_LARGE_BYTES)
    linked = (CollectivePoint, StepPoint)
    groups = sorted({point.group for point in points if isinstance(point, linked)})
    return Rates(
        macs_per_second=macs,
        copy_bytes_per_second=copy.num_bytes / seconds(copy),
        wires={group: _wire(group, seconds) for group in groups},
        kind=bench.device.kind,
    )


def _wire(group: Group, seconds: Callable[[Point], float]) -> LinearCost:
    small, large = (collective("all_to_all", group, size) for size in (_SMALL_BYTES, _LARGE_BYTES))
    start_seconds = seconds(small)
    beta_seconds = max(seconds(large) - start_seconds, 1e-7) / large.num_bytes
    return LinearCost(alpha_seconds=start_seconds, beta_seconds=beta_seconds)


def default_dtypes(kind: DeviceKind, preset: Preset) -> tuple[str, ...]:
    """Return the element types to measure by default; on a CPU only float32."""
    if kind == "cpu":
        return ("float32",)
    half = ("float16",) if preset == "full" else ()
    return ("float32", "bfloat16", *half)
