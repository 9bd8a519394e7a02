"""Records of a store: runs, machines, fits, observed runs, settled sizes, plans."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError, check_positive
from moetune.domain.plan import Decision
from moetune.domain.profile import Provenance

T = TypeVar("T")

RunStatus = Literal["running", "complete", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Generic[T]):
    """A value with the number and the time that the store gave it.

    Args:
        id: larger for later values.
        created_at: UTC, ISO 8601.
    """

    id: int
    created_at: str
    value: T


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One measuring run, or one imported profile."""

    id: int
    name: str
    provenance: Provenance
    device: str
    num_devices: int
    preset: str
    status: RunStatus
    num_samples: int
    created_at: str


SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 1e7
"""Least and most seconds of a step; beyond them ratios of steps cannot be drawn or computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """Steps of a training as measured and as predicted; raises InputError for impossible times.

    Args:
        plan_id: id of the plan that ran; "" for a launch file.
        profile, profile_fingerprint: profile that predicted the step.
        device: device of the profile's machine.
        target, target_version: the runtime and its version.
        layout: sizes and decisions of the layout, in words.
        seconds: the median step; nine of ten steps lie from `low_seconds` to `high_seconds`.
        num_steps: number of steps behind the median; 0 if the step was given without a log.
        predicted_seconds: predicted step without any calibration.
        memory_bytes: peak of a device; None if it was not observed.
        parts: measured seconds of a step by name, as far as a log has timers.
        source: the name of the log; "step" where the step was given.
    """

    plan_id: str
    model: str
    profile: str
    profile_fingerprint: str
    device: str
    target: str
    target_version: str
    world_size: int
    global_batch: int
    seq: int
    dtype: str
    layout: str
    seconds: float
    low_seconds: float
    high_seconds: float
    num_steps: int
    predicted_seconds: float
    source: str
    memory_bytes: int | None = None
    predicted_bytes: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_positive(self, "world_size", "global_batch", "seq")
        for name, seconds in self.times:
            if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
                raise InputError(f"{name} is {seconds:g} s, which no step takes")

    @property
    def times(self) -> tuple[tuple[str, float], ...]:
        """Measured and predicted times of a step, by name."""
        names = ("seconds", "low_seconds", "high_seconds", "predicted_seconds")
        return tuple((name, getattr(self, name)) for name in names)

    @property
    def decisions(self) -> frozenset[str]:
        """Decisions of the run; see `decisions_of`."""
        return decisions_of(self.world_size, self.seq, self.dtype, self.layout)

    @property
    def runtime(self) -> str:
        """The runtime's name and version: "megatron@0.19.0"."""
        return "@".join(filter(None, (self.target, self.target_version)))

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds."""
        return self.seconds / self.predicted_seconds

    @property
    def what(self) -> tuple[object, ...]:
        """What ran: two runs that share it share the error of their prediction."""
        return (self.model, self.world_size, self.global_batch, self.seq, self.dtype, self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Correction of a question's steps from observed runs; raises InputError for unordered factors.

    Args:
        factor: factor on every predicted step; it does not change their order.
        low_factor, high_factor: range of nine in ten steps, over predictions without calibration.
        num_runs: number of runs behind it, each of another question or layout.
        num_of_model: number of these runs that are of the question's model.
        num_left_out: number of runs that are so far off that they count as mistakes.
    """

    factor: float
    low_factor: float
    high_factor: float
    num_runs: int
    num_of_model: int = 0
    num_left_out: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.low_factor <= self.factor <= self.high_factor:
            raise InputError("a calibration's factors must be above 0 and in order")


def decisions_of(world_size: int, length: int, dtype: str, layout: str) -> frozenset[str]:
    """Return a run's decisions in words; runs that share many decisions take about equal times."""
    return frozenset({f"{world_size} ranks", f"length {length}", dtype, *layout.split(" · ")})


def factor_of(calibration: Calibration | None) -> float:
    """Return the factor of a calibration; 1 without any."""
    return 1.0 if calibration is None else calibration.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Decision of a search in training for one number of tokens.

    Args:
        plan_id: the plan whose answer the search began with.
        memory_reuse: the strategy that the layer was pinned to; None if it was free.
        tokens_per_rank: number of tokens that the group agreed on.
        seconds: raw times of one call's pipelined part, forward and backward, step by step.
        planned_seconds: median of these times with the plan's decision.
        num_steps: steps of the whole search, with its warm-up.
    """

    plan_id: str
    hardware_id: str
    memory_reuse: Strategy | None
    tokens_per_rank: int
    decision: Decision
    seconds: tuple[float, ...]
    planned_seconds: float
    num_steps: int

    @property
    def median_seconds(self) -> float:
        """The median of the steps."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInfo:
    """One stored plan in a list."""

    id: str
    model: str | None
    profile: str
    world_size: int
    tokens_per_rank: int
    created_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Numbers of rows that were removed from a store, or would be."""

    plans: int
    settled: int


def prediction_error(predicted: float, measured: float) -> float:
    """Return predicted / measured − 1, below 0 if the measured time is longer; 0 if it is 0."""
    return predicted / measured - 1 if measured else 0.0
