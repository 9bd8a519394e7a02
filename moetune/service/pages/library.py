"""What pages read: profiles by name, plans by id, observations; nothing is written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from moetune.domain.errors import InputError, NotFoundError, ProfileError
from moetune.domain.plan import Plan
from moetune.domain.ports import Store
from moetune.domain.records import FitInfo, Observation, PlanInfo, Stored
from moetune.workflows.files import bundled_profiles
from moetune.workflows.plan_view import PlanView, view_plan
from moetune.workflows.planner import ServicePlanner
from moetune.workflows.profile_view import machine_scope, worst_quality
from moetune.workflows.profiles import FoundProfile
from moetune.workflows.report import MOST_OBSERVATIONS

_NUMBER = re.compile(r"[0-9]{1,18}")
_MOST_SUMMARIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A profile in a list.

    Args:
        quality: of its worst fit; "" where no error is known.
    """

    provenance: str
    citation: str
    scope: str
    quality: str


class Library:
    """The planner's store as pages ask for it; shared by threads."""

    def __init__(self, planner: ServicePlanner) -> None:
        self.planner = planner
        self._summaries: dict[tuple[str, int | None], Summary] = {}
        self._lock = Lock()

    @property
    def store(self) -> Store:
        """The store, opened to read."""
        return self.planner.reading

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured and nothing planned."""
        store = self.store
        return not (store.plan_page(limit=1) or store.fits(limit=1) or store.machines(limit=1))

    def profile(self, name: str) -> FoundProfile:
        """Return the profile of that name in the store, else the reference machine.

        Never a file of the machine that serves, whatever the name looks like.

        Raises:
            NotFoundError: there is none.
        """
        try:
            return self.planner.sources.profile(name)
        except ProfileError as error:
            raise NotFoundError(error.what, error.hint) from None

    def summary(self, name: str) -> Summary:
        """Return a profile in short; it is read once for each fit of it.

        Raises:
            NotFoundError: there is none.
        """
        key = name, self.store.current_fit(name)
        with self._lock:
            kept = self._summaries.get(key)
        if kept is not None:
            return kept
        profile = self.profile(name).profile
        made = Summary(
            provenance=profile.provenance,
            citation=profile.citation,
            scope=machine_scope(profile),
            quality=worst_quality(profile),
        )
        with self._lock:
            if len(self._summaries) >= _MOST_SUMMARIES:
                self._summaries.clear()
            self._summaries[key] = made
        return made

    def profile_names(self) -> tuple[str, ...]:
        """Return the names of the store's profiles, newest first, and of the bundled ones."""
        names = (*(fit.profile for fit in self.fits()), *bundled_profiles())
        return tuple(dict.fromkeys(names))

    def fits(self) -> tuple[FitInfo, ...]:
        """Return the newest fits: one page of them."""
        return self.store.fits(limit=500)

    def plan(self, plan_id: str) -> Plan:
        """Return the plan whose id begins so.

        Raises:
            NotFoundError: there is none.
            InputError: there are several.
        """
        return self.planner.plan(plan_id)

    def view(self, plan_id: str) -> PlanView:
        """Return the plan's view.

        Raises:
            NotFoundError: there is no such plan.
        """
        return view_plan(self.planner.explain(plan_id))

    def newest_plans(self) -> Sequence[PlanInfo]:
        """Return some plans to choose from."""
        return self.store.plan_page(limit=50)

    def observations(self, plan_id: str | None) -> tuple[Stored[Observation], ...]:
        """Return the newest observations of a plan, or of all."""
        return self.store.observation_page(plan_id, limit=MOST_OBSERVATIONS)


def cursor(text: str) -> int:
    """Return the number in an address that a page of a list begins after.

    Raises:
        InputError: it is none.
    """
    if not text:
        return 0
    if not _NUMBER.fullmatch(text):
        raise InputError(f"after must be a whole number, got {text!r}", "begin with the first page")
    return int(text)
