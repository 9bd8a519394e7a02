"""Logs of runs: each runtime's lines give the steps, memory and timers that they were made of."""

import io
import random
import statistics
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from moetune.domain.errors import InputError
from moetune.logs.formats import READERS
from moetune.logs.lines import marked_lines
from moetune.logs.reading import LoggedRun, SteadySteps, check_sizes, read_log, steady_steps

DEEPSPEED = "[2026-05-06 07:08:09,101] [INFO]"
MEMORY = "memory: 61.25GiB(77.41%)"


def megatron(step: int, seconds: float, *, batch: int = 64) -> str:
    return (
        f" [2026-05-06 07:08:09.1] iteration {step:8}/     500 | consumed samples: {step:12} | "
        f"elapsed time per iteration (ms): {seconds * 1e3:.1f} | throughput per GPU (TFLOP/s/GPU): "
        f"212.5 | learning rate: 3.0E-04 | global batch size: {batch:5} | lm loss: 9.1E+00 |"
    )


def titan(step: int, seconds: float) -> str:
    return (
        f"[rank3]:\x1b[36m[titan] 2026-05-06 07:08:09,101 - root - INFO - \x1b[31mstep: {step:2}  "
        f"\x1b[32mloss:  7.12345  \x1b[38;2;180;60;0mgrad_norm:  1.2  \x1b[34m{MEMORY}  \x1b[36m"
        f"tps: {64 * 4096 / 16 / seconds:,.0f}  tflops: 312.50  mfu: 31.60%\x1b[39m"
    )


def deepspeed(step: int, seconds: float) -> str:
    return (
        f"{DEEPSPEED} [timer.py:264:stop] epoch=0/micro_step={4 * step}/global_step={step}, "
        f"RunningAvgSamplesPerSec=1.5, CurrSamplesPerSec={64 / seconds}, MemAllocated=40.5GB, "
        "MaxMemAllocated=61.25GB"
    )


def pipe(step: int, seconds: float) -> str:
    return f"steps: {step} loss: 6.5 iter time (s): {seconds:.5f} samples/sec: {64 / seconds:.3f}"


def nemo(step: int, seconds: float) -> str:
    return (
        f"pretraining/0 [default0]:Training epoch 0, iteration {step}/499 | lr: 3e-06 | "
        f"global_batch_size: 64 | global_step: {step} | peak_memory_usage: 70833405952 | "
        f"reduced_train_loss: 11.5 | train_step_timing in s: {seconds:.4g} | consumed_samples: 64"
    )


def train_bar(step: int, seconds: float) -> str:
    return f"\rTrain: {step // 5}%|▍   | {step}/500 [01:02<03:04, {seconds:.2f}s/it]"


def bar(step: int, seconds: float) -> str:
    return f"\r {step // 5}%|▍        | {step}/500 [01:02<03:04, {seconds:.2f}s/it]"


def fast_bar(step: int, seconds: float) -> str:
    return f"\r {step // 5}%|▍     | {step}/500 [01:02<03:04, {1 / seconds:.6f}it/s, loss=2.5]"


def log(tmp_path: Path, lines: Iterable[str]) -> LoggedRun:
    """Read a log of the lines, which has bytes of no text before them."""
    (tmp_path / "run.log").write_bytes(
        b"\xff\xfe\x00 noise \x80\n" + "".join(f"{line}\n" for line in lines).encode()
    )
    return read_log(tmp_path / "run.log")


def steady(run: LoggedRun, batch: int = 64) -> SteadySteps:
    return steady_steps(run, global_batch=batch, tokens_per_rank=64 * 4096 / 16)


@pytest.mark.parametrize(
    "write", [megatron, nemo, titan, deepspeed, pipe, bar, train_bar, fast_bar]
)
def test_the_step_is_the_median_of_what_the_lines_were_made_of(
    tmp_path: Path, write: Callable[[int, float], str]
) -> None:
    chance = random.Random(7)
    seconds = [30.0, 5.0, *(2.0 * chance.uniform(0.97, 1.03) for _ in range(41))]
    run = log(tmp_path, (write(step, time) for step, time in enumerate(seconds, 1)))
    timing = steady(run)
    assert timing.seconds == pytest.approx(statistics.median(seconds[2:]), rel=5e-3)
    assert min(seconds[2:]) * 0.99 < timing.low_seconds <= timing.seconds <= timing.high_seconds
    assert (timing.num_steps, timing.num_left_out, timing.notes) == (41, 2, ())
    assert {**run.memory} in ({}, {"reserved": 61.25 * 2**30}, {"allocated": 61.25 * 2**30})
    assert run.tflops == {"megatron": 212.5, "titan": 312.5}.get(write.__name__)


def test_steps_of_a_log_of_all_ranks_count_once(tmp_path: Path) -> None:
    ranks = [titan(step, 2.0 + step / 100) for step in range(1, 12) for _ in range(8)]
    timing = steady(log(tmp_path, ranks))
    assert (timing.num_steps, timing.num_left_out) == (10, 1)
    assert timing.seconds == pytest.approx(2.065, rel=1e-3)


@pytest.mark.parametrize(
    ("line", "less", "peaks"),
    [
        (
            ("[Rank 5] (after 2 steps) memory (MB) | allocated: 9.5 | max allocated: 61000.5 | "
            "reserved: 1.0 | max reserved: 65536.0"),
            "65536", {"allocated": 61000.5 * 2**20, "reserved": 65536 * 2**20},
        ),
        (
            ("job/0 [Rank 1] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 63.6 | "
            "mem-max-allocated-gigabytes: 153.4 | mem-max-reserved-gigabytes: 182.2 |"),
            "182.2", {"allocated": 153.4e9, "reserved": 182.2e9},
        ),
    ],
)  # fmt: skip
def test_the_largest_peak_of_the_ranks_counts(
    tmp_path: Path, line: str, less: str, peaks: dict[str, float]
) -> None:
    run = log(tmp_path, [megatron(1, 2.0), line, line.replace(less, "100.5"), megatron(2, 2.0)])
    assert run.memory == pytest.approx(peaks)


@pytest.mark.parametrize(
    ("line", "name", "seconds"),
    [
        ("    backward-compute ..............: (3.25, 512.50)", "backward-compute", 0.5125),
        ("    params-all-gather ...........................: 12.50", "params-all-gather", 0.0125),
        ("time (ms) | forward-compute: 58.5 | optimizer: 57.25 | batch: 5.0", "optimizer", 0.05725),
        ((f"{DEEPSPEED} [logging.py:96:log_dist] rank=0 time (ms) | forward: 652.5 | "
         "backward_inner: 2000.5 | step: 1172.5"), "backward_inner", 2.0005),
    ],
)  # fmt: skip
def test_timers_are_those_of_the_slowest_rank(
    tmp_path: Path, line: str, name: str, seconds: float
) -> None:
    lines = [text for step in range(1, 5) for text in (megatron(step, 2.0), line)]
    assert log(tmp_path, lines).timers[name] == pytest.approx(seconds)


def test_lines_without_a_number_of_a_step_are_read(tmp_path: Path) -> None:
    bridge = "Step Time : 2.00s GPU utilization: 412.5MODEL_TFLOP/s/GPU"
    lines = [f"{bridge}\n{megatron(step, 2.0)}".replace("212.5", "412.5") for step in range(1, 9)]
    assert log(tmp_path, lines).tflops == 412.5
    summary = "{'train_runtime': 100.5, 'train_steps_per_second': 0.5, 'train_loss': 1.5}"
    assert steady(log(tmp_path, ["{'loss': 2.5, 'grad_norm': 1.0}", summary])).seconds == 2.0
    swift = "{'loss': 1.5, 'iteration': '%d/90', 'memory(GiB)': 70.25, 'train_speed(s/it)': %f}"
    run = log(tmp_path, [swift % (step, 2 + 3 / step) for step in (1, 5, 30)])
    assert (steady(run).seconds, run.memory) == (2.1, {"reserved": 70.25 * 2**30})
    rates = swift.replace("(s/it)", "(iter/s)").replace("iteration", "global_step/max_steps")
    rated = log(tmp_path, [rates % (step, 1 / (2 + 3 / step)) for step in (1, 5, 30)])
    assert steady(rated).seconds == pytest.approx(2.1, rel=1e-5)
    assert rated.memory == run.memory
    iteration = megatron(5, 2.0).replace("| learning", "| memory(GiB): 70.25 | learning")
    assert log(tmp_path, [iteration]).memory == run.memory
    older = [titan(step, 2.0).replace("tps", "wps") for step in range(1, 9)]
    assert steady(log(tmp_path, older)).seconds == pytest.approx(2.0, rel=1e-3)
    line = "[INFO] [timer.py:189:stop] 0/%d, SamplesPerSec=%f, MemAllocated=0.26GB"
    run = log(tmp_path, [line % (step, 64 / (2 + 3 / step)) for step in (10, 20, 30)])
    assert steady(run).seconds == pytest.approx(2.1)
    lightning = "\rEpoch 0: : 40%%|██| %d/9 [01:02, global_step=%d.00, train_step_timing in s=%f]"
    run = log(tmp_path, ["".join(lightning % (step, step, 2 + step / 9) for step in range(10))])
    assert steady(run).num_steps == 9


def test_the_last_run_of_a_log_counts_with_its_sizes(tmp_path: Path) -> None:
    begins = "------------------------ arguments ------------------------"
    size = "  world_size ...................................... %d"
    first = [begins, size % 8, *(megatron(step, 9.0) for step in range(1, 20))]
    second = [begins, size % 16, *(megatron(step, 5.0) for step in range(1, 20))]
    run = log(tmp_path, [*first, *second])
    assert (run.num_runs, run.sizes["world_size"].value, steady(run).seconds) == (2, 16, 5.0)
    run = log(tmp_path, [*first, *(megatron(step, 2.0) for step in range(5, 30))])  # a checkpoint's
    assert (run.num_runs, run.first_line, steady(run).seconds) == (2, len(first) + 2, 2.0)


def test_bars_of_other_loops_are_not_steps(tmp_path: Path) -> None:
    shards = "\rLoading checkpoint shards: 100%|█████| 4/4 [00:05<00:00,  1.30s/it]"
    check = [f"\r {step}%|██ | {step}/9 [00:01<00:02, 7.00s/it]" for step in range(1, 10)]
    rows = "\rMap: 100%|████| 1000/1000 [00:01<00:00, 800.5 examples/s]"
    bars = [bar(step, 2.0) for step in range(1, 40)]
    whole = "".join([shards, rows, *bars[:20], *check, *bars[20:]])
    assert steady(log(tmp_path, [whole])).seconds == 2.0


@pytest.mark.parametrize(
    ("seconds", "word"), [(float("nan"), "no number"), (0.0, "0 s"), (1e9, "as no step does")]
)
def test_a_time_of_no_step_is_left_out_with_its_line(
    tmp_path: Path, seconds: float, word: str
) -> None:
    timing = steady(log(tmp_path, [megatron(1, 2.0), megatron(2, seconds), megatron(3, 2.0)]))
    assert timing.seconds == 2.0
    assert "line 3" in timing.notes[-1]
    assert word in timing.notes[-1]


def test_a_log_without_a_step_says_so_with_the_line_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no step") as caught:
        log(tmp_path, ["loss: 2.5", "epoch 1"])
    assert "--step" in caught.value.hint
    with pytest.raises(InputError, match="line 2: its step takes no number"):
        log(tmp_path, [megatron(1, float("inf"))])
    with pytest.raises(InputError, match="cannot be read"):
        read_log(tmp_path)


def test_another_job_is_refused_with_the_line_that_says_so(tmp_path: Path) -> None:
    world = "using world size: 8, data-parallel size: 8"
    run = log(tmp_path, [world, megatron(1, 2.0), megatron(2, 2.0)])
    check_sizes(run, {"world_size": 8})
    with pytest.raises(InputError, match="line 2: the run has world size 8, and the prediction 16"):
        check_sizes(run, {"world_size": 16})
    with pytest.raises(InputError, match=r"line 4: the run has global batch 64, .* prediction 128"):
        steady(run, 128)
    ramp = [megatron(step, 1.0, batch=32) for step in range(1, 9)]
    timing = steady(log(tmp_path, [*ramp, *(megatron(step, 2.0) for step in range(9, 20))]))
    assert (timing.seconds, len(timing.notes)) == (2.0, 1)


class Endless(io.BytesIO):
    """A file of 64 MiB of the same line."""

    def __init__(self, line: bytes) -> None:
        super().__init__()
        self.block, self.left = line * (2**20 // len(line)), 64

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        self.left -= 1
        return self.block[:size] if self.left > 0 else b""


@pytest.mark.parametrize("line", [b"x" * 128, b"noise of a loader \r", b"step of none\n" * 8])
def test_a_log_is_a_stream_whatever_its_size_and_its_lines(line: bytes) -> None:
    tracemalloc.start()
    assert sum(1 for _ in marked_lines(Endless(line), [*READERS])) == 0
    assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    tracemalloc.stop()


def test_line_numbers_are_those_of_an_editor() -> None:
    text = "".join(f"noise\r\n{megatron(step, 2.0)}\r\n" for step in range(1, 20_000))
    numbers = [line.number for line in marked_lines(io.BytesIO(text.encode()), [*READERS])]
    assert numbers == [*range(2, 39_999, 2)]
