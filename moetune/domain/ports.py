"""What the use cases need from the outside, as small protocols."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moetune.domain.hardware import Cluster, Fingerprint
from moetune.domain.plan import Decision, Plan, Strategy
from moetune.domain.profile import Profile, Provenance
from moetune.domain.samples import Sample

RunStatus = Literal["running", "complete", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One measuring run, or one imported profile.

    Args:
        created_at: UTC, ISO 8601.
    """

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
class Observation:
    """A measured step beside the plan that predicted it.

    Args:
        seconds: raw times of single steps, in order.
        source: who measured ("verify", "quickstart", "training").
    """

    plan_id: str
    forward_degree: int
    backward_degree: int
    tokens_per_rank: int
    predicted_seconds: float
    seconds: tuple[float, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What a search in training decided for one number of tokens.

    Args:
        plan_id: the plan whose answer the search began with.
        hardware_id: of the machine that trained.
        memory_reuse: the strategy that the layer was told to use, None where it was free.
        tokens_per_rank: the group's agreed number.
        seconds: raw times of one call's pipelined part, forward and backward, step by step.
        planned_seconds: the median of the same with the plan's answer.
        num_steps: steps that the whole search took, those that warmed up among them.
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


class Store(Protocol):
    """Keeps what was measured and planned. Rows are appended, never averaged away.

    Safe for several processes; every method commits before it returns.
    """

    @property
    def location(self) -> str:
        """Where the rows are, without a password."""
        ...

    def start_run(self, *, name: str, cluster: Cluster, preset: str) -> int:
        """Append a running measurement under that profile name and return its id."""
        ...

    def open_run(self, *, name: str, fingerprint: Fingerprint) -> int | None:
        """Return the latest unfinished run of that name, to resume it.

        None where it ran on other hardware or with other software: its samples say nothing
        about this machine as it is now.
        """
        ...

    def add_samples(self, run_id: int, samples: Sequence[Sample]) -> None:
        """Append samples to the run."""
        ...

    def samples(self, run_id: int) -> tuple[Sample, ...]:
        """Return the run's samples in the order they were measured."""
        ...

    def finish_run(self, run_id: int, *, status: RunStatus) -> None:
        """Close the run."""
        ...

    def save_profile(self, profile: Profile, *, run_id: int | None = None) -> None:
        """Append the fitted or imported profile: the newest of its name is the current one.

        Without `run_id` the profile is an imported one; its own samples are kept with it.
        """
        ...

    def profile(self, name: str) -> Profile | None:
        """Return the current profile of that name."""
        ...

    def runs(self) -> tuple[RunInfo, ...]:
        """Return every run, newest first."""
        ...

    def remove_profile(self, name: str) -> int:
        """Delete every run and fit of that name and return how many runs there were."""
        ...

    def save_plan(self, plan: Plan) -> None:
        """Append the plan; one of the same inputs by an older moetune gives way to it."""
        ...

    def plan(self, plan_id: str) -> Plan | None:
        """Return the plan whose id starts with `plan_id`.

        Raises:
            InputError: several do.
        """
        ...

    def plans(self) -> tuple[PlanInfo, ...]:
        """Return every plan, newest first."""
        ...

    def add_observation(self, observation: Observation) -> None:
        """Append one observation."""
        ...

    def observations(self, plan_id: str) -> tuple[Observation, ...]:
        """Return the plan's observations, oldest first."""
        ...

    def add_settled(self, settled: Settled) -> None:
        """Append what a search decided; earlier decisions for the same size stay."""
        ...

    def settled(self, plan_id: str) -> tuple[Settled, ...]:
        """Return what searches decided that began with the plan, oldest first."""
        ...
