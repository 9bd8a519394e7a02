"""Times of a GPU are its own: of kernels, not of launches, and of operands from memory."""

import time
from collections.abc import Callable

import pytest
import torch

from moetune.hardware import detect
from moetune.measure.device import CudaDevice, Device, open_device
from moetune.measure.kernels import in_turns, num_sets
from moetune.measure.operations import Experiment, TimedOperation, local_operation
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.timing import Effort, measure
from tests.cuda_kit import FakeCuda, MirrorWorld

KERNEL_SECONDS, LAUNCH_SECONDS = 2e-5, 4e-5
EFFORT = Effort(min_blocks=4, max_blocks=4, max_seconds=1.0, warmup_seconds=0.05)


def _launch_bound(cuda: FakeCuda) -> Callable[[], None]:
    """Return an operation that takes the simulated host longer than the GPU."""
    x = torch.zeros(4, device="cuda:0")

    def run() -> None:
        cuda.host.seconds += LAUNCH_SECONDS
        x.mul_(2)

    return run


def _cost(name: str) -> float:
    return KERNEL_SECONDS if name == "mul_" else 0.0


def test_kernels_that_are_shorter_than_their_launch_are_timed_without_it() -> None:
    with FakeCuda(cost=_cost) as cuda:
        experiment = Experiment(victim=local_operation(_launch_bound(cuda)))
        timing = measure(experiment, device=open_device(), ranks=MeasuringRanks(), effort=EFFORT)
    assert timing.seconds == pytest.approx([KERNEL_SECONDS] * 4)


def test_a_layers_step_is_timed_with_its_launches() -> None:
    with FakeCuda(cost=_cost) as cuda:
        experiment = Experiment(victim=local_operation(_launch_bound(cuda)), is_issued=True)
        timing = measure(experiment, device=open_device(), ranks=MeasuringRanks(), effort=EFFORT)
    assert all(LAUNCH_SECONDS <= time <= LAUNCH_SECONDS + KERNEL_SECONDS for time in timing.seconds)


def test_a_mark_is_the_devices_time_however_late_the_host_asks() -> None:
    with FakeCuda(cost=_cost) as cuda:
        device, there = CudaDevice(0), torch.zeros(1, device="cuda:0")
        with device.use():
            run, marks = _launch_bound(cuda), []
            for _ in range(3):
                for _ in range(100):
                    run()
                marks.append(device.mark())
            cuda.host.seconds += 1.0
            ends = [done() for done in marks]
        assert ends[2] - ends[1] == pytest.approx(100 * LAUNCH_SECONDS)
        assert abs(ends[0] - time.perf_counter()) < 60  # on the host's clock
        assert there.is_cuda


def test_what_ranks_do_together_is_done_once_before_the_clock_starts() -> None:
    costs = {"mul_": 1e-5, "add_": 1e-3}
    with FakeCuda(cost=lambda name: costs.get(name, 0.0)) as cuda, MirrorWorld(cuda):
        ranks, x = MeasuringRanks(), torch.zeros(4, device="cuda:0")
        left_barrier = [False]
        barrier = ranks.control.barrier

        def noted(name: str) -> None:
            barrier(name)
            left_barrier[0] = True

        ranks.control.barrier = noted  # type: ignore[method-assign] # to see when ranks leave it

        def issue() -> Callable[[], None]:
            if left_barrier[0]:  # the others are late
                x.add_(1)
            left_barrier[0] = False
            x.mul_(2)
            return lambda: None

        shared = Experiment(victim=TimedOperation(issue=issue))
        timing = measure(shared, device=open_device(), ranks=ranks, effort=EFFORT)
        assert timing.seconds == pytest.approx([1e-5] * 4)


def test_operands_take_turns_until_the_cache_has_been_filled_twice() -> None:
    with FakeCuda():
        device = CudaDevice(0)
        cache = device.cache_bytes
        assert [num_sets(n, device) for n in (2 * cache, 2 * cache - 1, cache // 2, 1)] == [
            1, 2, 4, 64,
        ]  # fmt: skip
        made: list[int] = []
        ran: list[int] = []

        def make() -> Callable[[], None]:
            made.append(len(made))
            return lambda number=made[-1]: ran.append(number)  # type: ignore[misc] # bound now

        run = in_turns(make, num_bytes=cache // 2, device=device)
        for _ in range(6):
            run()
        assert ran == [0, 1, 2, 3, 0, 1]
    assert num_sets(1, Device()) == 1


def test_the_fingerprint_tells_products_with_tf32_and_whether_clocks_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeCuda():

        def blind(_: object = None) -> int:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

        monkeypatch.setattr(torch.cuda, "clock_rate", blind)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
        exact = detect()
        assert exact.fingerprint.software["throttling"] == "unknown"
        assert any("throttling could not be read" in note for note in exact.notes)
        assert any("nvidia-ml-py" in note for note in exact.notes)
        monkeypatch.setattr(torch.cuda, "clock_rate", lambda _=None: 1980)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        fast = detect()
        assert fast.fingerprint.software["throttling"] == "seen"
        assert fast.fingerprint.software["float32_products"] == "high"
        assert fast.fingerprint.software_id != exact.fingerprint.software_id
