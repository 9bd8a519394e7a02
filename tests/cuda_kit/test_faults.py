"""The kit finds what is not waited for: streams, events, memory, collectives, ranks.

That it finds nothing else is shown by the tests of the runtime, which it lets through.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.cuda_kit import (
    CollectiveOrderError,
    CudaFaultError,
    FakeCuda,
    Issued,
    MirrorWorld,
    check_orders,
)
from tests.cuda_kit.group import MirrorWork

GPU = torch.device("cuda", 1)
Program = Callable[[int, MirrorWorld], None]


def _ones(size: int = 4) -> torch.Tensor:
    return torch.ones(size, device=GPU)


def _current() -> torch.cuda.Stream:
    return torch.cuda.current_stream(GPU)


def _side() -> torch.cuda.Stream:
    """Return a stream behind what the current one was given."""
    side = torch.cuda.Stream(GPU)
    side.wait_stream(_current())
    return side


def _event(reader: torch.cuda.Stream, writer: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    event.record(writer)
    event.wait(reader)


WAITS: dict[str, Callable[[torch.cuda.Stream, torch.cuda.Stream], object]] = {
    "for a stream": lambda reader, writer: reader.wait_stream(writer),
    "for its event": lambda reader, writer: reader.wait_event(writer.record_event()),
    "for an event": _event,
    "by the host": lambda _, writer: writer.synchronize(),
    "by the host for all": lambda *_: torch.cuda.synchronize(GPU),
    "for nothing": lambda *_: None,
    "for what was not recorded": lambda reader, _: reader.wait_event(torch.cuda.Event()),
}


@pytest.mark.parametrize("use", [lambda values: values + 1, lambda values: values.zero_()])
@pytest.mark.parametrize("wait", WAITS)
def test_a_use_of_what_another_stream_writes_must_wait(
    use: Callable[[torch.Tensor], object], wait: str
) -> None:
    is_fault = wait in {"for nothing", "for what was not recorded"}
    raises = pytest.raises(CudaFaultError, match="does not wait for it")
    with raises if is_fault else nullcontext(), FakeCuda():
        values, side = _ones(), torch.cuda.Stream(GPU)
        values.mul_(2)
        WAITS[wait](side, _current())
        with torch.cuda.stream(side):
            use(values)
        _current().wait_stream(side)


def _writes_what_is_read(*, waits: bool) -> None:
    values, side = _ones(), _side()
    with torch.cuda.stream(side):
        total = values.sum()
    if waits:
        _current().wait_stream(side)
    values.zero_()
    _current().wait_stream(side)
    del total


def _reads_rows(*, waits: bool) -> None:
    """Rows that an index names are the only ones touched."""
    values = torch.zeros(4, 2, device=GPU)
    first, others = (torch.tensor(rows, device=GPU) for rows in ([0], [3, 1] if waits else [3, 0]))
    side = _side()
    values.index_add_(0, first, torch.ones(1, 2, device=GPU))
    with torch.cuda.stream(side):
        picked = values.index_select(0, others)
    _current().wait_stream(side)
    del picked


def _records_too_early(*, waits: bool) -> None:
    values, side, event = _ones(), torch.cuda.Stream(GPU), torch.cuda.Event()
    if not waits:
        event.record(_current())
    values.mul_(2)
    if waits:
        event.record(_current())
    side.wait_event(event)
    with torch.cuda.stream(side):
        values.add_(1)
    _current().wait_stream(side)


def _frees(*, waits: bool, how: str) -> None:
    values, side = _ones(), _side()
    with torch.cuda.stream(side):
        result = values * 2
    if waits:
        _current().wait_stream(side)
    if how == "emptied":
        values.untyped_storage().resize_(0)
        values.untyped_storage().resize_(16)
    else:
        del values
    fresh = None if how == "never again" else _ones()
    del result, fresh


def _reads_a_copy(*, waits: bool) -> None:
    host = torch.zeros(4, pin_memory=True)
    host.copy_(_ones(), non_blocking=True)
    if waits:
        _current().record_event().synchronize()
    assert float(host.sum()) == 4


def _fills_again(*, waits: bool) -> None:
    host = torch.ones(4, pin_memory=True)
    values = host.to(GPU, non_blocking=True)
    if waits:
        torch.cuda.synchronize(GPU)
    host.zero_()
    assert values.tolist() == [1.0] * 4


def _uses_a_thread(*, waits: bool) -> None:
    with ThreadPoolExecutor(1) as pool:
        host = torch.zeros(4)
        host.add_(1)
        future = pool.submit(host.mul_, 2)
        if waits:
            future.result()
        host.add_(1)
        future.result()


FREED = "was freed and may be handed out again"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (_writes_what_is_read, r"read by sum .* written by zero_ .* does not wait"),
        (_reads_rows, r"written by index_add_ .* read by index_select"),
        (_records_too_early, "does not wait"),
        *((partial(_frees, how=how), FREED) for how in ("deleted", "emptied", "never again")),
        (_reads_a_copy, r"written by copy_ .* read by sum .* on the host"),
        (_fills_again, r"read by copy_ .* written by zero_ .* on the host"),
        (_uses_a_thread, r"written by mul_ .* on thread 1 of the host"),
    ],
)
def test_what_does_not_wait_is_reported(program: Callable[..., None], words: str) -> None:
    with FakeCuda():
        program(waits=True)
    with pytest.raises(CudaFaultError, match=words), FakeCuda():
        program(waits=False)


WRONG_DEVICE: dict[str, Callable[[], object]] = {
    "an event is recorded": lambda: torch.cuda.Event().record(),
    "waits for cuda:0": lambda: torch.cuda.Stream(GPU).wait_stream(torch.cuda.current_stream()),
    "cuda:0's default stream waits": lambda: torch.cuda.current_stream().wait_event(
        torch.cuda.Stream(GPU).record_event()
    ),
    "the host waits for cuda:0": lambda: torch.cuda.synchronize(None),
    "the host waits for cuda:0's": lambda: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("what", WRONG_DEVICE)
def test_a_device_without_tensors_is_used_by_mistake(what: str) -> None:
    def run(device: torch.device | int) -> None:
        with FakeCuda():
            torch.cuda.set_device(device)
            _ones()
            WRONG_DEVICE[what]()

    with pytest.raises(CudaFaultError, match=f"{what}.*no tensor is on cuda:0"):
        run(0)
    run(GPU)


def test_neither_tensors_nor_events_of_two_devices_meet() -> None:
    with FakeCuda():
        for other in (torch.ones(4), torch.ones(4, device="cuda:0")):
            with pytest.raises(RuntimeError, match="to be on the same device"):
                _ones() + other
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:2")
        event = torch.cuda.Event()
        event.record(_current())
        with pytest.raises(RuntimeError, match="does not match recording stream's device cuda:0"):
            event.record(torch.cuda.current_stream(0))


def _logs(program: Program, num_ranks: int = 2) -> list[list[Issued]]:
    """Run a program on every rank, one after another."""
    logs = []
    for rank in range(num_ranks):
        with FakeCuda() as cuda:
            with MirrorWorld(cuda, rank=rank, num_ranks=num_ranks) as world:
                program(rank, world)
            torch.cuda.synchronize(GPU) if cuda.is_used(GPU) else None
        logs.append(world.log)
    return logs


def _sum(values: torch.Tensor, group: dist.ProcessGroup | None = None) -> MirrorWork:
    work = dist.all_reduce(values, group=group, async_op=True)
    assert isinstance(work, MirrorWork)
    return work


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_a_collective_is_waited_for_before_its_result_is_read(device: torch.device) -> None:
    def program(_: int, __: MirrorWorld, *, waits: bool) -> None:
        values = torch.ones(4, device=device)
        work = _sum(values)
        if waits:
            work.wait()
        assert (values + 1).tolist() == [3.0] * 4
        work.wait()

    check_orders(_logs(partial(program, waits=True)))
    with pytest.raises(CudaFaultError, match=r"written by all_reduce of group 0 .* does not wait"):
        _logs(partial(program, waits=False))


@pytest.mark.parametrize("waits_aside", [True, False])
def test_a_collective_is_behind_its_stream_alone(*, waits_aside: bool) -> None:
    def program(_: int, __: MirrorWorld) -> None:
        values, side = _ones(), torch.cuda.Stream(GPU)
        work = _sum(values) if waits_aside else None
        with torch.cuda.stream(side):
            (work or _sum(values)).wait()
        values.add_(1)

    with pytest.raises(CudaFaultError, match="all_reduce"):
        _logs(program)


def _two_groups(rank: int, _: MirrorWorld, *, ends: bool) -> None:
    groups = [dist.new_group(group_desc=name) for name in ("tokens", "chunks")]
    for group in groups if ends or rank == 0 else reversed(groups):
        _sum(torch.ones(1, device=GPU), group)


def _waits_between(rank: int, _: MirrorWorld, *, ends: bool) -> None:
    """On the host only a wait between them orders two communicators."""
    groups = [dist.new_group(), dist.new_group()]
    works = []
    for group in groups if rank == 0 else reversed(groups):
        works.append(_sum(torch.ones(1), group))
        if not ends:
            works[-1].wait()
    for work in works:
        work.wait()


def _three_pairs(rank: int, _: MirrorWorld, *, ends: bool) -> None:
    pairs = [(0, 1), (1, 2), (0, 2)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    mine = [pair for pair in pairs if rank in pair]
    for pair in mine if ends or rank else reversed(mine):
        _sum(torch.ones(1, device=GPU), groups[pair])


def _leaves_out(rank: int, _: MirrorWorld, *, ends: bool) -> None:
    if ends or rank == 0:
        _sum(torch.ones(1, device=GPU))


def _of_another_dtype(rank: int, _: MirrorWorld, *, ends: bool) -> None:
    _sum(torch.ones(1, dtype=(torch.float32, torch.float64)[rank * (not ends)], device=GPU))


CIRCLE = "each of these waits for the next"


@pytest.mark.parametrize(
    ("program", "num_ranks", "words"),
    [
        (_two_groups, 2, CIRCLE),
        (_waits_between, 2, CIRCLE),
        (_three_pairs, 3, CIRCLE),
        (_leaves_out, 2, r"ranks \[1\] never issue collective 0"),
        (_of_another_dtype, 2, r"disagree on collective 0 .*float32.*float64"),
    ],
)
def test_ranks_that_would_wait_for_ever_are_reported(
    program: Callable[..., None], num_ranks: int, words: str
) -> None:
    check_orders(_logs(partial(program, ends=True), num_ranks))
    with pytest.raises(CollectiveOrderError, match=words):
        check_orders(_logs(partial(program, ends=False), num_ranks))
