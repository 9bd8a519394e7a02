"""The protocol of a store, as the use cases need it; its contract stands here, once."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from moetune.domain.cluster import Cluster, Fingerprint
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.records import (
    FitInfo,
    MachineInfo,
    Observation,
    PlanInfo,
    Removed,
    RunInfo,
    RunStatus,
    Settled,
    Stored,
)
from moetune.domain.samples import Sample
from moetune.domain.training_document import TrainingDocument


class Store(Protocol):
    """Storage of measurements and plans. Rows are appended, never averaged away.

    Safe for several processes and threads; every method commits before it returns. Lists that
    take `after` are pages, newest first: `after` is the id of the previous page's last entry, and
    rows appended meanwhile do not shift the pages that follow.
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

        None where it ran on other hardware or with other software: its samples do not describe
        this machine as it is now.
        """
        ...

    def add_samples(self, run_id: int, samples: Sequence[Sample]) -> None:
        """Append samples to the run.

        Raises:
            InputError: a time that no operation takes (`moetune.domain.storable`).
        """
        ...

    def samples(self, run_id: int) -> tuple[Sample, ...]:
        """Return the run's samples in the order they were measured."""
        ...

    def finish_run(self, run_id: int, *, status: RunStatus) -> None:
        """Close the run."""
        ...

    def save_profile(self, profile: Profile, *, run_id: int | None = None) -> None:
        """Append the fitted or imported profile: the newest of its name is the current one.

        Without `run_id` the profile is an imported one, stored with its own samples.

        Raises:
            InputError: it has times or rates of no machine (`moetune.domain.storable`).
        """
        ...

    def profile(self, name: str) -> Profile | None:
        """Return the current profile of that name."""
        ...

    def runs(self) -> tuple[RunInfo, ...]:
        """Return every run, newest first."""
        ...

    def current_fit(self, name: str) -> int | None:
        """Return the id of the current profile's fit; None where no profile has that name.

        A cheap check whether a profile has changed since it was read.
        """
        ...

    def machines(self, *, after: int = 0, limit: int = 50) -> tuple[MachineInfo, ...]:
        """Return a page of the machines.

        Args:
            after: id of the last one seen, 0 for the beginning.
            limit: most entries, at least 1.
        """
        ...

    def fits(self, *, after: int = 0, limit: int = 50) -> tuple[FitInfo, ...]:
        """Return a page of the fits; arguments as of `machines`."""
        ...

    def remove_profile(self, name: str) -> int:
        """Delete every run and fit of that name and return how many runs there were."""
        ...

    def save_plan(self, plan: Plan) -> None:
        """Append the plan; one of the same inputs by an older moetune gives way to it.

        Raises:
            InputError: it predicts a time that no step takes (`moetune.domain.storable`).
        """
        ...

    def plan(self, plan_id: str) -> Plan | None:
        """Return the plan whose id starts with `plan_id`; None where it is a training plan.

        Raises:
            InputError: several plans do.
        """
        ...

    def save_training_plan(self, plan: TrainingDocument) -> None:
        """Append the training plan; one of the same inputs by an older moetune gives way to it.

        Raises:
            InputError: it predicts a time that no step takes (`moetune.domain.storable`).
        """
        ...

    def training_plan(self, plan_id: str) -> TrainingDocument | None:
        """Return the training plan whose id starts with `plan_id`; None where it is no such plan.

        Raises:
            InputError: several plans do.
        """
        ...

    def plan_document(self, plan_id: str) -> str | None:
        """Return the canonical JSON of the plan with exactly this id, as it is stored."""
        ...

    def plan_documents(self, plan_ids: Sequence[str]) -> Mapping[str, str]:
        """Return the canonical JSON of the plans with exactly these ids, those that are stored."""
        ...

    def plans(self) -> tuple[PlanInfo, ...]:
        """Return every plan, newest first."""
        ...

    def plan_page(self, *, after: str = "", limit: int = 50) -> tuple[PlanInfo, ...]:
        """Return a page of the plans.

        A plan that a newer moetune solves again moves to the front.

        Args:
            after: id of the last one seen, "" for the beginning.
            limit: most entries, at least 1.

        Raises:
            NotFoundError: there is no plan `after`.
        """
        ...

    def add_observation(self, observation: Observation) -> None:
        """Append one observation."""
        ...

    def add_observations(self, observations: Sequence[Observation]) -> None:
        """Append observations, all or none.

        Raises:
            InputError: a plan is not stored, or a time is one that no step takes; the text names
                the first one.
        """
        ...

    def observation_page(
        self, plan_id: str | None, *, after: int = 0, limit: int = 200
    ) -> tuple[Stored[Observation], ...]:
        """Return a page of the observations of a plan, or of all for None.

        Args:
            after: id of the last one seen, 0 for the beginning.
            limit: most entries, at least 1.
        """
        ...

    def observations(self, plan_id: str) -> tuple[Observation, ...]:
        """Return the plan's observations, oldest first."""
        ...

    def add_settled(self, settled: Settled) -> None:
        """Append a search's decision; earlier decisions for the same size are not replaced."""
        ...

    def settled(self, plan_id: str) -> tuple[Settled, ...]:
        """Return the decisions of searches that began with the plan, oldest first."""
        ...

    def remove_plans(self, plan_ids: Sequence[str]) -> Removed:
        """Delete plans with exactly these ids, and what was observed and settled under them.

        Raises:
            NotFoundError: one of them is not stored; then none is deleted.
        """
        ...

    def remove_observations(self, numbers: Sequence[int]) -> int:
        """Delete the observations of these ids and return how many there were.

        Raises:
            NotFoundError: one of them is not stored; then none is deleted.
        """
        ...

    def prune(self, before: str, *, dry_run: bool = False) -> Removed:
        """Delete observations and settled sizes from before a time, and plans without later ones.

        Args:
            before: UTC, ISO 8601, as of `Stored`.
            dry_run: count only.
        """
        ...

    def compact(self) -> None:
        """Give the space of deleted rows back; others wait meanwhile."""
        ...

    def size_bytes(self) -> int:
        """Return the bytes that the rows and their indices take."""
        ...

    def check_ready(self) -> None:
        """Check that the database can be read and written now; nothing is written.

        Raises:
            StoreUnavailableError: it is locked, full or away.
            SchemaMismatchError: it has another schema.
        """
        ...
