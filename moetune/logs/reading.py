"""The training run in a log: its steps after warm-up, its memory, and the sizes of its job."""

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moetune.domain.errors import InputError
from moetune.domain.records import LONGEST_SECONDS, SHORTEST_SECONDS
from moetune.domain.units import format_seconds
from moetune.logs.formats import LABELS, READERS, Entry, LogFormat, MemoryScope, entry_of
from moetune.logs.lines import marked_lines

_MOST_STEPS = 100_000
"""Number of a run's newest steps that are stored."""
_SLOW = 1.1
"""First steps count as warm-up while they take longer than this times the second half's median."""
_NO_STEPS = (
    "lines of Megatron, Megatron-Bridge, torchtitan, DeepSpeed and transformers' Trainer are read: "
    "give a rank's log that has them, or the step with --step 19.7s"
)


class Size(NamedTuple):
    """A size of the job, and the number of the line that prints it."""

    value: int
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A run as its log reports it.

    Args:
        first_line: number of the run's first line in the log.
        num_runs: number of runs with steps in the log; this is the last of them.
        steps: timed steps in order; a step number appears once per rank that prints it.
        sizes: sizes of the job by name.
        memory: largest peak of the ranks that print it, in bytes.
        timers: median seconds by the runtime's name of the timer.
        tflops: median TFLOP/s per device, as the runtime counts them.
        wrong: remark on the first line whose time cannot be a step's; "" if there is none.
    """

    file: str
    format: LogFormat
    first_line: int
    num_runs: int
    steps: tuple[Entry, ...]
    sizes: Mapping[str, Size]
    memory: Mapping[MemoryScope, float]
    timers: Mapping[str, float]
    tflops: float | None
    wrong: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadySteps:
    """Step times after the warm-up.

    Args:
        seconds: median step time.
        low_seconds, high_seconds: 5th and 95th percentile of the step times.
        num_steps: number of steps that count.
        num_left_out: number of first steps that are left out as warm-up.
        notes: remarks on how the times were obtained.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    num_steps: int
    num_left_out: int = 0
    notes: tuple[str, ...] = ()


def read_log(path: Path) -> LoggedRun:
    """Return the last run with steps in a log of any size, which is read as a stream.

    Raises:
        InputError: the file cannot be read, or has no step.
    """
    try:
        with path.open("rb") as file:
            return _last_run(str(path), file)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", "give a file") from None


def steady_steps(run: LoggedRun, *, global_batch: int, tokens_per_rank: float) -> SteadySteps:
    """Return the times of a run's steps that have the job's global batch, after the warm-up.

    Args:
        global_batch: sequences of a step.
        tokens_per_rank: tokens of a step, divided by the number of ranks.

    Raises:
        InputError: no step has that batch.
    """
    batches = {step.batch for step in run.steps} - {None}
    of_job = [step for step in run.steps if step.batch in (None, global_batch)]
    if not of_job:
        line, batch = run.steps[-1].line, run.steps[-1].batch
        raise _mismatch(run, line, "global batch", batch or 0, global_batch)
    notes = []
    if len(batches) > 1:
        notes.append(
            f"{len(run.steps) - len(of_job)} steps have another global batch, and are left out"
        )
    if any(step.is_mean for step in of_job):
        of_job = of_job[-1:]
        notes.append("the log has the mean of all steps, its beginning among them")
    seconds = [_seconds(step, global_batch, tokens_per_rank) for step in of_job]
    times = [*_by_number(of_job, seconds)]
    start = _warm_up(times)
    steady = sorted(times[start:])
    if len(times) == 1 and not of_job[0].is_mean:
        notes.append("the log has a single step, and warming up is part of it")
    if run.wrong:
        notes.append(run.wrong)
    return SteadySteps(
        seconds=statistics.median(steady), low_seconds=_quantile(steady, 0.05),
        high_seconds=_quantile(steady, 0.95), num_steps=len(steady), num_left_out=start,
        notes=tuple(notes),
    )  # fmt: skip


def check_sizes(run: LoggedRun, expected: Mapping[str, int]) -> None:
    """Raise InputError if a size that the log prints differs from the job's or the layout's.

    Args:
        expected: sizes by name, such as `world_size`, `d_model` and `tp`.
    """
    for name, size in run.sizes.items():
        wanted = expected.get(name, size.value)
        is_batch = name == "global_batch" and any(step.batch for step in run.steps)
        if size.value != wanted and not is_batch:  # a batch-size ramp changes it
            raise _mismatch(run, size.line, name.replace("_", " "), size.value, wanted)


def _mismatch(run: LoggedRun, line: int, what: str, value: int, wanted: int) -> InputError:
    return InputError(
        f"{run.file}, line {line}: the run has {what} {value:,}, and the prediction {wanted:,}",
        "give the plan or the launch file that this run was started with",
    )


def _by_number(steps: Sequence[Entry], seconds: Sequence[float]) -> Iterator[float]:
    """Yield the seconds of each step; if several ranks print it, the median of their times."""
    same: list[float] = []
    number: int | None = None
    for step, time in zip(steps, seconds, strict=True):
        if same and (step.step is None or step.step != number):
            yield statistics.median(same)
            same = []
        number = step.step
        same.append(time)
    if same:
        yield statistics.median(same)


def _seconds(step: Entry, global_batch: int, tokens_per_rank: float) -> float:
    if step.seconds is not None:
        return step.seconds
    if step.tokens is not None:
        return tokens_per_rank / step.tokens
    return global_batch / (step.samples or 1.0)


def _warm_up(times: Sequence[float]) -> int:
    """Return the number of warm-up steps: the first step, and the slow steps that follow it."""
    start, half = min(1, len(times) - 1), len(times) // 2
    usual = statistics.median(times[half:])
    while start < half and times[start] > _SLOW * usual:
        start += 1
    return start


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


@dataclass(slots=True)
class _Run:
    """A run while its lines are read."""

    first_line: int
    steps: dict[tuple[LogFormat, int], deque[Entry]] = field(default_factory=dict)
    sizes: dict[str, Size] = field(default_factory=dict)
    memory: dict[MemoryScope, float] = field(default_factory=dict)
    timers: dict[str, deque[float]] = field(default_factory=dict)
    tflops: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    wrong: str = ""
    _pace: int = 1

    def begins_again(self, entry: Entry) -> bool:
        """Return whether a new run starts: the line says so, or its step number goes back."""
        if entry.begins:
            return bool(self.steps)
        last = self.steps.get((entry.format, entry.bar))
        if not last or entry.step is None or last[-1].step is None:
            return False
        return entry.step < last[-1].step - 2 * self._pace

    def take(self, entry: Entry) -> None:
        """Add the values of a line to the run."""
        for name, value in entry.sizes.items():
            self.sizes.setdefault(name, Size(value, entry.line))
        for scope, size in entry.memory.items():
            self.memory[scope] = max(size, self.memory.get(scope, 0.0))
        for name, seconds in entry.timers.items():
            self.timers.setdefault(name, deque(maxlen=_MOST_STEPS)).append(seconds)
        if entry.tflops:
            self.tflops.append(entry.tflops)
        if entry.is_timed and self._is_sound(entry):
            steps = self.steps.setdefault(
                (entry.format, entry.bar), deque(maxlen=_MOST_STEPS)
            )  # fmt: skip
            if steps and entry.step and steps[-1].step and entry.step > steps[-1].step:
                self._pace = entry.step - steps[-1].step
            steps.append(entry)

    def _is_sound(self, entry: Entry) -> bool:
        rates = [rate for rate in (entry.tokens, entry.samples) if rate is not None]
        is_rate = all(isfinite(rate) and rate > 0 for rate in rates)
        seconds = 1.0 if entry.seconds is None else entry.seconds
        if is_rate and SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
            return True
        took = format_seconds(seconds) if is_rate and isfinite(seconds) else "no number"
        self.wrong = self.wrong or (
            f"line {entry.line}: its step takes {took}, as no step does, and is left out"
        )
        return False

    def as_logged(self, file: str, num_runs: int) -> LoggedRun:
        """Return the run with the steps of the format that prints them most exactly."""
        formats = [*LABELS]
        key = min(
            self.steps, key=lambda kind: (formats.index(kind[0]), -len(self.steps[kind]))
        )  # fmt: skip
        return LoggedRun(
            file=file, format=key[0], first_line=self.first_line, num_runs=num_runs,
            steps=tuple(self.steps[key]), sizes=self.sizes, memory=self.memory,
            timers={name: statistics.median(times) for name, times in self.timers.items()},
            tflops=statistics.median(self.tflops) if self.tflops else None, wrong=self.wrong,
        )  # fmt: skip


def _last_run(name: str, file: BinaryIO) -> LoggedRun:
    run, last, num_runs, wrong = _Run(1), None, 0, ""
    for line in marked_lines(file, [*READERS]):
        entry = entry_of(line)
        if entry is None:
            continue
        if run.begins_again(entry):
            run, last, num_runs = _Run(line.number), run, num_runs + 1
        run.take(entry)
        wrong = wrong or run.wrong
    if run.steps:
        last, num_runs = run, num_runs + 1
    if last is None:
        what = f"{wrong}, and no other line has a step" if wrong else "has no step"
        raise InputError(f"{name}{', ' if wrong else ' '}{what}", _NO_STEPS)
    return last.as_logged(name, num_runs)
