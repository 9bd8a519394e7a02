"""Records of a store: runs, machines, fits, observations, settled sizes, plans."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from moetune.domain.cluster import DeviceKind
from moetune.domain.constraints import Strategy
from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError, check_positive
from moetune.domain.operations import OperationTimes
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineInfo:
    """One kind of machine that something was measured on, or published of.

    Args:
        facts: of the hardware; empty for published ones.
        created_at: of its first run; UTC, ISO 8601.
    """

    id: int
    device: str
    kind: DeviceKind
    num_devices: int
    devices_per_node: int
    memory_bytes: int
    hardware_id: str
    facts: Mapping[str, str]
    created_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FitInfo:
    """One fit: a profile as it was saved at one time."""

    id: int
    profile: str
    machine_id: int
    provenance: Provenance
    num_samples: int
    created_at: str


SHORTEST_SECONDS, LONGEST_SECONDS = 1e-9, 1e7
"""Least and most seconds of a step: beyond them its ratios cannot be drawn, or not be computed."""
OBSERVATIONS_SCHEMA = "moetune.observations/1"
MAX_OBSERVATIONS = 1000
"""Most observations that a service stores, and so a job sends, in one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Measured times of a step, and the plan that predicted it.

    Args:
        seconds: raw times of single steps, in order.
        predicted_seconds: 0 where nothing was predicted.
        source: who measured ("verify", "quickstart", "training", "search").
        operations: times of the steps' operations; empty where they were not observed.
        device_id: of the machine, see `Fingerprint`; "" where the sender does not know it.

    Raises:
        InputError: a count below 1, no times, or one that is negative or not finite.
    """

    plan_id: str
    forward_degree: int
    backward_degree: int
    tokens_per_rank: int
    predicted_seconds: float
    seconds: tuple[float, ...]
    source: str
    operations: tuple[OperationTimes, ...] = ()
    device_id: str = ""
    strategy: Strategy | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        check_positive(self, "forward_degree", "backward_degree", "tokens_per_rank")
        if not self.seconds:
            raise InputError("seconds is empty: an observation has at least one time")
        if not all(0 <= time < math.inf for time in (self.predicted_seconds, *self.seconds)):
            raise InputError("seconds must be finite and not negative")

    @property
    def median_seconds(self) -> float:
        """The median of the steps' times."""
        return statistics.median(self.seconds)

    @property
    def is_sound(self) -> bool:
        """Whether a step can take its times; older versions stored any."""
        operations = (seconds for times in self.operations for seconds in times.seconds)
        times = (self.predicted_seconds, *self.seconds, *operations)
        return all(SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS for seconds in times)

    @property
    def error(self) -> float | None:
        """See `prediction_error`; None where nothing was predicted."""
        if not self.predicted_seconds:
            return None
        return prediction_error(self.predicted_seconds, self.median_seconds)


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
    observations: int
    settled: int


def prediction_error(predicted: float, measured: float) -> float:
    """Return predicted / measured − 1, below 0 for what took longer than predicted.

    0 where nothing was measured: a step of no time has no error.
    """
    return predicted / measured - 1 if measured else 0.0
