"""Profiles and plans for a `Planner`, from a service's store or from a user's machine."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from moetune.app.files import find_plan
from moetune.app.profiles import ResolvedProfile, find_profile, named_profile, newest_measured
from moetune.app.wiring import StoreFinder
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import NotFoundError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.records import ObservedRun
from moetune.domain.spelling import about
from moetune.report.words import earlier_runs_words

if TYPE_CHECKING:
    from moetune.store import SqlStore


MOST_PROFILES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sources:
    """Sources on a user's machine: files, the store if it exists, and reference machines.

    Args:
        stores: opens the store to read it.
        store: the store for new plans; None to store no plans.
        named: the profile's file or name from the command line, or a program's profile.
        default_profile: the profile's file or name from the settings.
    """

    stores: StoreFinder
    store: "SqlStore | None" = None
    named: str | Profile | None = None
    default_profile: str | None = None

    @property
    def must_match(self) -> bool:
        """Whether a profile other than the plan's is an error, because the user named it."""
        return self.named is not None

    def plan(self, wanted: str) -> AnyPlan:
        """Return the plan of a file, or of an id in the store."""
        return find_plan(wanted, stores=self.stores)

    def profile(self, name: str | None, *, for_models: bool = False) -> ResolvedProfile:
        """Return the profile that `name` gives, else `named`, the setting, the newest measured.

        With `for_models` the newest measured profile is of GPUs. Errors: see `find_profile`.
        """
        wanted = (name, self.named, self.default_profile)
        first = next((text for text in wanted if text is not None), None)
        with about("profile"):
            return find_profile(first, stores=self.stores, for_models=for_models)

    def profile_of(self, plan: AnyPlan) -> ResolvedProfile:
        """Return the profile that the command line names, else the profile of the plan's name."""
        if self.named is not None:
            with about("profile"):
                return find_profile(self.named, stores=self.stores)
        with self.stores() as store:
            return named_profile(plan.inputs.profile, store=store)

    def stored(self, plan_id: str) -> Plan | None:
        """Return the stored plan of a layer with this id; None if there is no plan or no store."""
        with self.stores() as store:
            plan = store.plan(plan_id) if store else None
        return None if plan is None else plan.as_layer()

    def observed_runs(self, profile: Profile) -> tuple[ObservedRun, ...]:
        """Return the runs that were predicted with a profile's present numbers, newest first.

        Older runs, from before a profile was measured again, say nothing of its present errors.
        """
        with self.stores() as store:
            runs = store.observed_runs(profile_fingerprint=profile.digest) if store else ()
        return tuple(run.value for run in runs)

    def save(self, plan: AnyPlan) -> None:
        """Store the plan if there is a store for new plans."""
        if self.store is not None:
            self.store.save_plan(plan)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredSources(Sources):
    """Sources in a service's store; requests cannot name files of the service's machine.

    Profiles are cached by name and fit. Otherwise a service would read all samples and compute the
    digest for every request.

    Args:
        reading: the same database as `store`, opened read-only.
        default_profile: a name; None for the newest measured profile.
    """

    reading: "SqlStore"
    stores: StoreFinder = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _cached: Callable[[str, int | None], ResolvedProfile] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stores", partial(nullcontext, self.reading))
        object.__setattr__(self, "_cached", lru_cache(MOST_PROFILES)(self._read))

    def plan(self, wanted: str) -> AnyPlan:
        """Return the stored plan of an id or its beginning.

        Raises:
            NotFoundError, InputError: there is no such plan, or there are several.
        """
        plan = self.reading.plan(wanted)
        if plan is None:
            raise NotFoundError(
                f"no plan has an id that begins with {wanted[:64]!r}",
                "this store does not have the plans of another store: its list names its plans",
            )
        return plan

    def profile(self, name: str | None, *, for_models: bool = False) -> ResolvedProfile:
        """Return the profile of this name; None for the default profile."""
        if name is None:
            name = self.default_profile or newest_measured(self.reading, for_models=for_models)
        with self._lock:
            return self._cached(name, self.reading.current_fit(name))

    def profile_of(self, plan: AnyPlan) -> ResolvedProfile:
        """Return the profile of the plan's name; it may have changed since."""
        return self.profile(plan.inputs.profile)

    def _read(self, name: str, _fit: int | None) -> ResolvedProfile:
        machine = named_profile(name, store=self.reading)
        _ = machine.profile.digest  # computed here, so that no second thread computes it
        return machine


def earlier_runs_note(store: "SqlStore | None", profile: Profile) -> str:
    """Return a note if all runs of a profile were predicted with its earlier numbers; else ""."""
    runs = store.observed_runs(profile=profile.name) if store is not None else ()
    if not runs or any(run.value.profile_fingerprint == profile.digest for run in runs):
        return ""
    return earlier_runs_words(profile.name, len(runs))
