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
"""Least and most seconds of a step: beyond them its ratios cannot be drawn, or not be computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """Steps of a training as measured, and as predicted; InputError of what no step takes.

    Args:
        plan_id: of the plan that the run is of; "" for a launch file.
        profile, profile_fingerprint: that the step was predicted with.
        device: of the profile's machine.
        target, target_version: the runtime.
        layout: its sizes and decisions, in words.
        seconds: the median step; nine of ten steps lie from `low_seconds` to `high_seconds`.
        num_steps: behind the median; 0 where the step was given without a log.
        predicted_seconds: without any calibration.
        memory_bytes: peak of a device; None where it was not observed.
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
        """Its steps by name, measured and predicted."""
        names = ("seconds", "low_seconds", "high_seconds", "predicted_seconds")
        return tuple((name, getattr(self, name)) for name in names)

    @property
    def decisions(self) -> frozenset[str]:
        """What was decided of it; see `decisions_of`."""
        return decisions_of(self.world_size, self.seq, self.dtype, self.layout)

    @property
    def runtime(self) -> str:
        """Its name and version: "megatron@0.19.0"."""
        return "@".join(filter(None, (self.target, self.target_version)))

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds."""
        return self.seconds / self.predicted_seconds

    @property
    def what(self) -> tuple[object, ...]:
        """What ran: two runs that have it in common have the error of a prediction in common."""
        return (self.model, self.world_size, self.global_batch, self.seq, self.dtype, self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What observed runs say of a question's steps; InputError of factors in no order.

    Args:
        factor: on every predicted step, and so of no influence on their order.
        low_factor, high_factor: of nine in ten steps, over predictions without a calibration.
        num_runs: that it is from, each of another question or layout.
        num_of_model: of them of the question's model.
        num_left_out: that are so far off that they are taken to be mistaken.
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
    """Return what is decided of a run, in words: two that share many take about as long."""
    return frozenset({f"{world_size} ranks", f"length {length}", dtype, *layout.split(" · ")})


def factor_of(calibration: Calibration | None) -> float:
    """Return the factor of a calibration; 1 without any."""
    return 1.0 if calibration is None else calibration.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Decision of a search in training for one number of tokens.

    Args:
        plan_id: the plan whose answer the search began with.
        memory_reuse: the strategy that the layer was pinned to, None where it was free.
        tokens_per_rank: the group's agreed number.
        seconds: raw times of one call's pipelined part, forward and backward, step by step.
        planned_seconds: the median of the same with the plan's answer.
        num_steps: steps of the whole search, with those that warmed up.
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
    """Return predicted / measured − 1, below 0 for what took longer; 0 of no measured time."""
    return predicted / measured - 1 if measured else 0.0
