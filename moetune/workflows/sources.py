"""Sources of profiles and plans for a planner: a service's stores, or a person's machine."""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from moetune.domain.errors import NotFoundError
from moetune.domain.plan import Plan
from moetune.domain.ports import Store
from moetune.workflows.files import find_plan
from moetune.workflows.profiles import FoundProfile, find_profile, named_profile, newest_measured
from moetune.workflows.single_flight import SingleFlight
from moetune.workflows.wiring import StoreFinder

MOST_PROFILES = 8


class PlanSources(Protocol):
    """Profiles and plans as a planner looks them up."""

    @property
    def must_match(self) -> bool:
        """Whether the profile was named for the plan: another one is then an error."""
        ...

    def plan(self, wanted: str) -> Plan:
        """Return the plan whose id begins so.

        Raises:
            InputError: there is none (a NotFoundError in a service), or there are several.
        """
        ...

    def profile(self, name: str | None) -> FoundProfile:
        """Return the profile of that name; None for the default one.

        Raises:
            ProfileError: nothing has that name, or nothing was measured yet.
        """
        ...

    def profile_of(self, plan: Plan) -> FoundProfile:
        """Return the profile that is called as the plan's, whether changed or not.

        Raises:
            ProfileError: nothing has that name.
        """
        ...

    def stored(self, plan_id: str) -> Plan | None:
        """Return the stored plan with this id."""
        ...

    def save(self, plan: Plan) -> None:
        """Store a new plan, where plans are stored."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileCache:
    """The profiles of a store, by name. Threads may share it.

    Args:
        store: read only when a profile is wanted that is not, or no longer, here.
    """

    store: Store
    _found: OrderedDict[tuple[str, int | None], FoundProfile] = field(
        default_factory=OrderedDict, init=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _reading: SingleFlight[FoundProfile] = field(default_factory=SingleFlight, init=False)

    def find(self, name: str) -> FoundProfile:
        """Return the current profile of that name, its digest worked out.

        Raises:
            ProfileError: nothing has that name.
        """
        key = name, self.store.current_fit(name)
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        return self._reading.run(key, lambda: self._read(key))

    def _read(self, key: tuple[str, int | None]) -> FoundProfile:
        name, fit = key
        found = named_profile(name, store=self.store)
        _ = found.digest  # worked out now, by one thread
        if self.store.current_fit(name) == fit:  # else it was read while it changed
            with self._lock:
                self._found[key] = found
                while len(self._found) > MOST_PROFILES:
                    self._found.popitem(last=False)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredSources:
    """A service's stores. Nobody outside names a file of its machine.

    Args:
        reading: the same database as `store`, without the right to write.
        default_profile: a name; None for the newest measured.
    """

    store: Store
    reading: Store
    default_profile: str | None
    profiles: ProfileCache = field(init=False)
    must_match: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "profiles", ProfileCache(store=self.reading))

    def plan(self, wanted: str) -> Plan:
        """Return the stored plan."""
        found = self.reading.plan(wanted)
        if found is None:
            raise NotFoundError(f"no plan has an id that begins with {wanted[:64]!r}")
        return found

    def profile(self, name: str | None) -> FoundProfile:
        """Return the profile from the cache."""
        if name is None:
            name = self.default_profile or newest_measured(self.reading)
        return self.profiles.find(name)

    def profile_of(self, plan: Plan) -> FoundProfile:
        """Return the profile from the cache."""
        return self.profiles.find(plan.inputs.profile)

    def stored(self, plan_id: str) -> Plan | None:
        """Return the stored plan."""
        return self.reading.plan(plan_id)

    def save(self, plan: Plan) -> None:
        """Store the plan."""
        self.store.save_plan(plan)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalSources:
    """A person's machine: files, the store where there is one, and the reference machines.

    Args:
        stores: opens the store to read.
        store: where new plans go; None to store none.
        named: the profile's file or name, from the command line.
        default_profile: the same, from the settings.
    """

    stores: StoreFinder
    store: Store | None = None
    named: str | None = None
    default_profile: str | None = None

    @property
    def must_match(self) -> bool:
        """Whether the command line names a profile."""
        return self.named is not None

    def plan(self, wanted: str) -> Plan:
        """Return the plan of a file, or of an id in the store."""
        return find_plan(wanted, stores=self.stores)

    def profile(self, name: str | None) -> FoundProfile:
        """Return the profile of a file or name; by default as named, set, or measured last."""
        return find_profile(name or self.named or self.default_profile, stores=self.stores)

    def profile_of(self, plan: Plan) -> FoundProfile:
        """Return the profile that the command line names, else the plan's by its name."""
        if self.named is not None:
            return find_profile(self.named, stores=self.stores)
        with self.stores() as store:
            return named_profile(plan.inputs.profile, store=store)

    def stored(self, plan_id: str) -> Plan | None:
        """Return the plan of the store, where there is one."""
        with self.stores() as store:
            return store.plan(plan_id) if store else None

    def save(self, plan: Plan) -> None:
        """Store the plan where plans are stored."""
        if self.store is not None:
            self.store.save_plan(plan)
