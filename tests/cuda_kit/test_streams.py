"""The kit finds every way in which streams, events and memory can go wrong, and nothing else."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils import _device as torch_device

from tests.cuda_kit import CudaFaultError, FakeCuda

GPU = torch.device("cuda", 1)


def _ones(size: int = 4) -> torch.Tensor:
    return torch.ones(size, device=GPU)


def _side() -> torch.cuda.Stream:
    return torch.cuda.Stream(GPU)


def _wait_stream(reader: torch.cuda.Stream, writer: torch.cuda.Stream) -> None:
    reader.wait_stream(writer)


def _wait_event(reader: torch.cuda.Stream, writer: torch.cuda.Stream) -> None:
    reader.wait_event(writer.record_event())


def _own_event(reader: torch.cuda.Stream, writer: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    event.record(writer)
    event.wait(reader)


def _host_waits_for_the_stream(_: torch.cuda.Stream, writer: torch.cuda.Stream) -> None:
    writer.synchronize()


def _host_waits_for_the_device(*_: torch.cuda.Stream) -> None:
    torch.cuda.synchronize(GPU)


WAITS = (
    _wait_stream, _wait_event, _own_event, _host_waits_for_the_stream, _host_waits_for_the_device,
)  # fmt: skip


def _write_then(use: Callable[[torch.Tensor], object], wait: Callable[..., None] | None) -> None:
    """Write on the current stream, and use what was written on another one."""
    with FakeCuda():
        values, side = _ones(), _side()
        values.mul_(2)
        if wait is not None:
            wait(side, torch.cuda.current_stream(GPU))
        with torch.cuda.stream(side):
            use(values)
        torch.cuda.current_stream(GPU).wait_stream(side)


def _read(values: torch.Tensor) -> object:
    return values + 1


def _overwrite(values: torch.Tensor) -> object:
    return values.zero_()


@pytest.mark.parametrize("use", [_read, _overwrite])
def test_a_use_of_what_another_stream_writes_must_wait(use: Callable[[torch.Tensor], None]) -> None:
    with pytest.raises(CudaFaultError, match="which does not wait for it"):
        _write_then(use, None)
    for wait in WAITS:
        _write_then(use, wait)


@pytest.mark.parametrize("waits", [True, False])
def test_a_write_must_wait_for_a_read_on_another_stream(*, waits: bool) -> None:
    def run() -> None:
        with FakeCuda():
            values, side = _ones(), _side()
            side.wait_stream(torch.cuda.current_stream(GPU))
            with torch.cuda.stream(side):
                total = values.sum()
            if waits:
                torch.cuda.current_stream(GPU).wait_stream(side)
            values.zero_()
            torch.cuda.current_stream(GPU).wait_stream(side)
            del total

    if waits:
        run()
    else:
        with pytest.raises(
            CudaFaultError, match=r"read by sum .* written by zero_ .* does not wait"
        ):
            run()


def test_two_reads_and_other_bytes_of_a_buffer_need_no_order() -> None:
    with FakeCuda():
        values, side = _ones(8), _side()
        side.wait_stream(torch.cuda.current_stream(GPU))
        total = values[:4] + 1
        with torch.cuda.stream(side):
            values[4:].zero_()
            other = values[4:] + values[4:]
        torch.cuda.current_stream(GPU).wait_stream(side)
        del total, other


def test_rows_that_are_named_by_an_index_are_the_only_ones_touched() -> None:
    def run(rows: list[int]) -> None:
        with FakeCuda():
            values, side = torch.zeros(4, 2, device=GPU), _side()
            first, others = torch.tensor([0], device=GPU), torch.tensor(rows, device=GPU)
            side.wait_stream(torch.cuda.current_stream(GPU))
            values.index_add_(0, first, torch.ones(1, 2, device=GPU))
            with torch.cuda.stream(side):
                picked = values.index_select(0, others)
            torch.cuda.current_stream(GPU).wait_stream(side)
            del picked

    run([3, 1])
    with pytest.raises(CudaFaultError, match=r"written by index_add_ .* read by index_select"):
        run([3, 0])


def test_an_order_reaches_through_other_streams_and_events() -> None:
    with FakeCuda():
        values, first, second = _ones(), _side(), _side()
        first.wait_stream(torch.cuda.current_stream(GPU))
        second.wait_event(first.record_event())
        with torch.cuda.stream(second):
            values.add_(1)
        torch.cuda.current_stream(GPU).wait_stream(second)
        values.add_(1)


def test_an_event_is_the_point_where_it_was_recorded_and_nothing_before_that() -> None:
    for is_late in (True, False):
        with FakeCuda() as cuda:
            values, side, event = _ones(), _side(), torch.cuda.Event()
            if not is_late:
                event.record(torch.cuda.current_stream(GPU))
            values.mul_(2)
            if is_late:
                event.record(torch.cuda.current_stream(GPU))
            side.wait_event(event)
            with torch.cuda.stream(side):
                values.add_(1)
            assert bool(cuda.faults) is not is_late
            torch.cuda.current_stream(GPU).wait_stream(side)
            cuda.faults.clear()
        with pytest.raises(CudaFaultError, match="does not wait"):
            _write_then(_read, lambda reader, _: reader.wait_event(torch.cuda.Event()))


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("how", ["deleted", "emptied", "never again"])
def test_memory_is_not_handed_out_while_another_stream_uses_it(how: str, *, waits: bool) -> None:
    def run() -> None:
        with FakeCuda():
            values, side = _ones(), _side()
            side.wait_stream(torch.cuda.current_stream(GPU))
            with torch.cuda.stream(side):
                result = values * 2
            if waits:
                torch.cuda.current_stream(GPU).wait_stream(side)
            if how == "emptied":
                values.untyped_storage().resize_(0)
                values.untyped_storage().resize_(16)
            else:
                del values
            fresh = None if how == "never again" else _ones()
            del result, fresh

    if waits:
        run()
    else:
        with pytest.raises(CudaFaultError, match="was freed and may be handed out again"):
            run()


def test_a_wait_between_the_end_of_a_tensor_and_the_next_one_is_in_time() -> None:
    with FakeCuda():
        values, side = _ones(), _side()
        side.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(side):
            values.add_(1)
        del values
        torch.cuda.current_stream(GPU).wait_stream(side)
        _ones()


WRONG_DEVICE: dict[str, Callable[[], object]] = {
    "an event is recorded": lambda: torch.cuda.Event().record(),
    "waits for cuda:0": lambda: _side().wait_stream(torch.cuda.current_stream()),
    "cuda:0's default stream waits": lambda: torch.cuda.current_stream().wait_event(
        _side().record_event()
    ),
    "the host waits for cuda:0": torch.cuda.synchronize,
    "the host waits for cuda:0's": lambda: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("what", WRONG_DEVICE)
def test_a_device_without_tensors_is_used_by_mistake(what: str) -> None:
    def run(*, sets_device: bool) -> None:
        with FakeCuda():
            if sets_device:
                torch.cuda.set_device(GPU)
            _ones()
            use = WRONG_DEVICE[what]
            torch.cuda.synchronize() if use is SYNCHRONIZE else use()

    with pytest.raises(CudaFaultError, match=f"{what}.*no tensor is on cuda:0"):
        run(sets_device=False)
    run(sets_device=True)


SYNCHRONIZE = WRONG_DEVICE["the host waits for cuda:0"]


def test_an_event_belongs_to_the_device_of_its_first_record() -> None:
    with FakeCuda():
        _ones(), torch.ones(1, device="cuda:0")
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(GPU))
        with pytest.raises(RuntimeError, match="does not match recording stream's device cuda:0"):
            event.record(torch.cuda.current_stream(0))


def test_work_runs_on_its_tensors_device_whatever_the_current_device_is() -> None:
    with FakeCuda() as cuda:
        values, other = _ones(), torch.ones(1, device="cuda:0")
        with torch.cuda.stream(torch.cuda.Stream(0)):
            assert torch.cuda.current_device() == 0
            values.add_(1)
        with torch.cuda.device(1):
            assert torch.cuda.current_stream() == torch.cuda.current_stream(GPU)
        names = [one.lane.name for one in cuda.operations if one.label == "add_"]
        assert names == ["cuda:1's default stream"]
        del other


@pytest.mark.parametrize("used_before", [False, True])
def test_the_device_of_a_context_is_that_of_what_is_made_in_it(*, used_before: bool) -> None:
    torch_device._device_constructors.cache_clear()
    if used_before:
        with torch.device("cpu"):
            torch.empty(2)
    with FakeCuda(), torch.device(GPU):
        assert torch.zeros(2).device == torch.empty_like(torch.ones(2)).device == GPU
        assert nn.Linear(2, 2).weight.device == GPU
        assert torch.zeros(2, device="cpu").device == torch.device("cpu")
    with torch.device("meta"):
        assert torch.zeros(2).device == torch.device("meta")


def test_tensors_of_two_devices_do_not_meet() -> None:
    with FakeCuda():
        for other in (torch.ones(4), torch.ones(4, device="cuda:0")):
            with pytest.raises(RuntimeError, match="to be on the same device"):
                _ones() + other
        assert (_ones() * torch.tensor(2.0)).tolist() == [2.0] * 4
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:2")


def _copied(*, pinned: bool, non_blocking: bool, waits: bool) -> float:
    """Copy to the host, and look at what arrived."""
    with FakeCuda():
        host = torch.zeros(4, pin_memory=pinned)
        host.copy_(_ones(), non_blocking=non_blocking)
        if waits:
            torch.cuda.current_stream(GPU).record_event().synchronize()
        return float(host.sum())


def test_the_host_waits_for_asynchronous_copies() -> None:
    with pytest.raises(CudaFaultError, match=r"written by copy_ .* read by sum .* on the host"):
        _copied(pinned=True, non_blocking=True, waits=False)
    assert _copied(pinned=True, non_blocking=True, waits=True) == 4
    assert _copied(pinned=False, non_blocking=True, waits=False) == 4
    assert _copied(pinned=True, non_blocking=False, waits=False) == 4
    with pytest.raises(CudaFaultError, match="on the host"), FakeCuda():
        _ones().to("cpu", non_blocking=True).tolist()


@pytest.mark.parametrize("waits", [True, False])
def test_host_memory_is_not_filled_again_while_a_copy_may_read_it(*, waits: bool) -> None:
    def run() -> None:
        with FakeCuda():
            host = torch.ones(4, pin_memory=True)
            values = host.to(GPU, non_blocking=True)
            if waits:
                torch.cuda.synchronize(GPU)
            host.zero_()
            assert values.tolist() == [1.0] * 4

    if waits:
        run()
    else:
        with pytest.raises(
            CudaFaultError, match=r"read by copy_ .* written by zero_ .* on the host"
        ):
            run()


def test_a_thread_is_ordered_by_its_submission_and_its_result() -> None:
    def run(*, asks: bool) -> None:
        with FakeCuda(), ThreadPoolExecutor(1) as pool:
            host = torch.zeros(4)
            host.add_(1)
            future = pool.submit(host.mul_, 2)
            if asks:
                future.result()
            host.add_(1)
            future.result()

    run(asks=True)
    with pytest.raises(CudaFaultError, match=r"written by mul_ .* on thread 1 of the host"):
        run(asks=False)


def test_the_host_waits_where_it_needs_a_value() -> None:
    with FakeCuda() as cuda:
        values = _ones()
        assert cuda.syncs == []
        assert values.sum().item() == 4
        assert values.tolist() == [1.0] * 4
        assert torch.tensor([1, 2], device=GPU).cpu().numpy().tolist() == [1, 2]
        assert cuda.syncs == ["_local_scalar_dense", "tolist", "a constant", "a copy"]
        with pytest.raises(TypeError, match="can't convert cuda"):
            values.numpy()


def test_events_tell_simulated_times_once_they_were_waited_for() -> None:
    with FakeCuda(cost=lambda name: 3e-3 if name == "mm" else 0.0):
        torch.cuda.set_device(GPU)
        weight, events = torch.ones(2, 2, device=GPU), []
        for _ in range(3):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)
            weight @ weight
        start, _, end = events
        with pytest.raises(RuntimeError, match="must be completed"):
            start.elapsed_time(end)
        end.synchronize()
        assert start.elapsed_time(end) == pytest.approx(6)
        with pytest.raises(RuntimeError, match="enable_timing=True"):
            start.elapsed_time(torch.cuda.Event())
        with pytest.raises(RuntimeError, match="must be recorded"):
            start.elapsed_time(torch.cuda.Event(enable_timing=True))


def test_two_streams_overlap_in_simulated_time() -> None:
    with FakeCuda(cost=lambda name: 1.0 if name == "mul" else 0.0) as cuda:
        values, side = _ones(), _side()
        side.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(side):
            one = values * 2
        two = values * 3
        torch.cuda.current_stream(GPU).wait_stream(side)
        three = values * 4
        spans = [
            (one.start_seconds, one.end_seconds) for one in cuda.operations if one.label == "mul"
        ]
        assert spans == [(0, 1), (0, 1), (1, 2)]
        del one, two, three


def test_training_on_one_stream_is_without_fault_and_computes_what_a_cpu_does() -> None:
    def train(device: torch.device | str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        x = torch.randn(16, 4)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(x.to(device)).square().sum().backward()
            optimizer.step()
        return next(model.parameters()).detach().cpu()

    with FakeCuda():
        found = train(GPU)
    assert torch.equal(found, train("cpu"))
    assert found.device == torch.device("cpu")
