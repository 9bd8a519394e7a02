"""Operations: allocate a point's tensors, and return the function that runs the point once.

`session` calls this for every point, and `timing` and `background` run the result. Operations write
to reused buffers, as the layer does: fresh buffers would measure page faults.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moetune.comm.group import Communicator, OneRank, Transfer
from moetune.domain.errors import InputError
from moetune.domain.plan import SAFE_DECISION
from moetune.domain.samples import (
    LAUNCHES,
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmPoint,
    InterferencePoint,
    Point,
    ResourceClass,
    RowsPoint,
    StepPoint,
)
from moetune.measure.device import Device, drop
from moetune.measure.kernels import attention, chunked_layer, gemm, in_turns, memory_bound_op
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.sizes import memory_bytes
from moetune.measure.steps import random_steps

_FLOAT_BYTES = 4
_OPPOSITE: dict[Direction, Direction] = {"h2d": "d2h", "d2h": "h2d"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOperation:
    """An operation that is measured, or that runs in the background.

    Args:
        issue: starts a run, and returns a function that orders the current stream (on a CPU: the
            caller) after its end.
        at_once: number of the point's operations that a run issues together.
        ranks_meet: the operation is a collective, which all ranks must run equally often.
        is_serial: a run is issued only when the previous run has ended. Its engine would otherwise
            serve only this stream while the stream has work.
    """

    issue: Callable[[], Callable[[], None]]
    at_once: int = 1
    ranks_meet: bool = False
    is_serial: bool = False

    def run(self) -> None:
        """Run once, and order the current stream after the run."""
        self.issue()()


def local_operation(run: Callable[[], None], *, at_once: int = 1) -> TimedOperation:
    """Return the operation for a function that issues its work to the current stream."""

    def issue() -> Callable[[], None]:
        run()
        return _nothing

    return TimedOperation(issue=issue, at_once=at_once)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The timed operation, and the operations that must run in the background meanwhile.

    Args:
        is_issued: the time includes the host's time to issue the operation, as in a layer's step.
    """

    victim: TimedOperation
    background_loads: tuple[TimedOperation, ...] = ()
    is_issued: bool = False

    @property
    def is_stream(self) -> bool:
        """Whether the victim's blocks follow each other without a pause."""
        return self.victim.ranks_meet


@dataclass(frozen=True, slots=True, kw_only=True)
class Representatives:
    """An operation for each resource class, to measure how the classes slow each other down.

    Args:
        comm: None on a single rank, which has no other rank to communicate with.
    """

    comp: GemmPoint
    comm: CollectivePoint | None
    mem: CopyPoint

    def of(self, name: ResourceClass, point: InterferencePoint) -> Point:
        """Return the class's operation; "comm" has the point's size.

        Raises:
            InputError: there is no other rank to communicate with.
        """
        operation = {"comp": self.comp, "comm": self.comm, "mem": self.mem}[name]
        if operation is None:
            raise InputError("one rank has no communication to measure")
        if point.comm_bytes and isinstance(operation, CollectivePoint):
            in_flight = 1 if point.is_alone else operation.in_flight
            return replace(operation, num_bytes=point.comm_bytes, in_flight=in_flight)
        return operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The device, ranks and representative operations with which points are measured."""

    device: Device
    ranks: MeasuringRanks
    representatives: Representatives


def prepare_experiment(point: Point, bench: Bench) -> Experiment:
    """Allocate and fill the point's tensors, and return its experiment.

    Raises:
        InputError: the point cannot be measured on these ranks.
        RuntimeError: torch cannot run the point, for example for lack of memory.
    """
    match point:
        case InterferencePoint():
            victim, *loads = (
                _sharing(bench.representatives.of(name, point), bench)
                for name in (point.victim, *point.others)
            )
            return Experiment(victim=victim, background_loads=tuple(loads))
        case CopyPoint(both_ways=True):
            opposite = replace(point, direction=_OPPOSITE[point.direction], both_ways=False)
            load = _operation(opposite, bench)
            return Experiment(victim=_operation(point, bench), background_loads=(load,))
        case _:
            is_issued = isinstance(point, StepPoint) or getattr(point, "op", "") in LAUNCHES
            return Experiment(victim=_operation(point, bench), is_issued=is_issued)


def _sharing(point: Point, bench: Bench) -> TimedOperation:
    """Return the operation as it runs next to others: a GPU's copies share an engine.

    An H100's engine ran one stream's copies while there were any, and none of another stream's for
    seconds.
    """
    is_loopback = isinstance(point, CollectivePoint) and point.group_size == 1
    is_serial = is_loopback or isinstance(point, CopyPoint)
    return replace(_operation(point, bench), is_serial=is_serial)


def _operation(point: Point, bench: Bench) -> TimedOperation:
    device = bench.device
    match point:
        case StepPoint():
            return _step(point, bench)
        case RowsPoint() if point.op in LAUNCHES:
            return local_operation(chunked_layer(point, device))
        case GemmPoint() | RowsPoint() | AttentionPoint():
            run = in_turns(
                lambda: _computation(point, device), num_bytes=memory_bytes(point), device=device
            )
            return local_operation(run)
        case CopyPoint():
            return local_operation(_copy(point, device))
        case CollectivePoint(group_size=1):
            return _loopback(point, device)
        case CollectivePoint():
            return _collective(point, device, bench.ranks)
        case _:
            raise InputError(f"no single operation is measured as {point}")


def _computation(
    point: GemmPoint | RowsPoint | AttentionPoint, device: Device
) -> Callable[[], None]:
    if isinstance(point, GemmPoint):
        return gemm(point, device)
    if isinstance(point, RowsPoint):
        return memory_bound_op(point, device)
    return attention(point, device)


def _step(point: StepPoint, bench: Bench) -> TimedOperation:
    """Return a layer's step; on a rank outside of its groups it does nothing."""
    alone = point.workload.world_size == 1
    group = OneRank() if alone else bench.ranks.group(point.group)
    if group is None:
        return local_operation(_nothing)
    device = bench.device.torch_device
    steps = random_steps(point.workload, device=device, communicator=group)
    steps.layer.pin(SAFE_DECISION.with_degree(point.degree))
    return local_operation(steps.once)


def _copy(point: CopyPoint, device: Device) -> Callable[[], None]:
    # It is written before it is read: all unwritten pages are the same page of zeros.
    host = device.host_bytes(point.num_bytes, pinned=point.pinned).fill_(1)
    inside = torch.ones_like(host, device=device.torch_device)
    target, source = (inside, host) if point.direction == "h2d" else (host, inside)
    return lambda: drop(target.copy_(source, non_blocking=point.pinned))


def _loopback(point: CollectivePoint, device: Device) -> TimedOperation:
    """Return a single rank's replacement for a link: device to pinned host memory to device."""
    if point.op != "all_to_all":
        raise InputError(f"{point.op} over one rank moves nothing")
    sent = torch.ones(point.num_bytes, dtype=torch.uint8, device=device.torch_device)
    received = [torch.zeros_like(sent) for _ in range(point.in_flight)]
    host = device.host_bytes(point.num_bytes, pinned=True).fill_(1)

    def run() -> None:
        for target in received:
            host.copy_(sent, non_blocking=True)
            target.copy_(host, non_blocking=True)

    return local_operation(run, at_once=point.in_flight)


def _collective(point: CollectivePoint, device: Device, ranks: MeasuringRanks) -> TimedOperation:
    step = _FLOAT_BYTES * point.group_size
    if point.num_bytes < step or point.num_bytes % step:
        raise InputError(
            f"{point.op} of {point.num_bytes} bytes does not divide into {point.group_size} ranks"
        )
    group = ranks.group(point.group)
    starters = (
        [] if group is None else [_starter(point, device, group) for _ in range(point.in_flight)]
    )

    def issue() -> Callable[[], None]:
        transfers = [start() for start in starters]

        def finish() -> None:
            for transfer in transfers:
                transfer.wait()

        return finish

    return TimedOperation(issue=issue, at_once=point.in_flight, ranks_meet=True)


def _starter(point: CollectivePoint, device: Device, group: Communicator) -> Callable[[], Transfer]:
    """Return a function that starts a collective on separate buffers."""
    count, size, op = point.num_bytes // _FLOAT_BYTES, point.group_size, point.op
    sent = torch.ones(count, device=device.torch_device)
    if op == "send":
        return _neighbour_exchange(sent, group)
    num_received = {"all_gather": count * size, "reduce_scatter": count // size}
    received = torch.zeros(num_received.get(op, count), device=device.torch_device)
    start: dict[str, Callable[[], Transfer]] = {
        "all_to_all": lambda: group.all_to_all(received, sent, None, None, op),
        "all_reduce": lambda: group.all_reduce(sent, op),
        "all_gather": lambda: group.all_gather(received, sent, op),
        "reduce_scatter": lambda: group.reduce_scatter(received, sent, op),
    }
    return start[op]


def _neighbour_exchange(sent: torch.Tensor, group: Communicator) -> Callable[[], Transfer]:
    """Return a function that sends to the next and the previous rank, as pipeline stages do.

    Between 1F1B's forward and backward pass an activation and a gradient travel together.
    """
    neighbours = {group.rank - 1, group.rank + 1} & set(range(group.num_ranks))
    to = dict.fromkeys(neighbours, sent)
    source = {rank: torch.zeros_like(sent) for rank in neighbours}
    return lambda: group.send_receive(to, source, "send")


def _nothing() -> None:
    """Do nothing, because the run is already in the current stream."""
