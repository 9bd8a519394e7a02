"""What pages read: profiles by name, plans by id, observations; nothing is written."""

import re
from collections.abc import Sequence
from threading import Lock

from moetune.domain.errors import InputError, NotFoundError
from moetune.domain.plan import Plan
from moetune.domain.ports import FitInfo, Kept, Observation, PlanInfo, Store
from moetune.domain.profile import Profile
from moetune.workflows.desk import Desk
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.plan_view import PlanView, view_plan
from moetune.workflows.report import MOST_OBSERVATIONS

_MOST_KEPT = 32
_NUMBER = re.compile(r"[0-9]{1,18}")


class Library:
    """The desk's store as pages ask for it; shared by threads.

    A profile is kept until a newer fit of its name is there: to read thousands of samples takes
    longer than to draw them.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._profiles: dict[tuple[str, int | None], Profile] = {}
        self._lock = Lock()

    @property
    def store(self) -> Store:
        """The store, opened to read."""
        return self.desk.reading

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured and nothing planned."""
        store = self.store
        return not (store.plan_page(limit=1) or store.fits(limit=1) or store.machines(limit=1))

    def profile(self, name: str) -> Profile:
        """Return the profile of that name in the store, else the reference machine.

        Never a file of the machine that serves, whatever the name looks like.

        Raises:
            NotFoundError: there is none.
        """
        key = name, self.store.current_fit(name)
        with self._lock:
            kept = self._profiles.get(key)
        if kept is not None:
            return kept
        found = self.store.profile(name) if key[1] is not None else None
        bundled = bundled_profiles()
        if found is None and name in bundled:
            found = load_profile_file(bundled[name])
        if found is None:
            raise NotFoundError(
                f"there is no profile {name!r}", "the machines page lists those that there are"
            )
        with self._lock:
            if len(self._profiles) >= _MOST_KEPT:
                self._profiles.clear()
            self._profiles[key] = found
        return found

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
        found = self.store.plan(plan_id) if plan_id else None
        if found is None:
            raise NotFoundError(
                f"no plan has an id that begins with {plan_id!r}",
                "the plans page lists those that there are",
            )
        return found

    def view(self, plan_id: str) -> PlanView:
        """Return the plan's view.

        Raises:
            NotFoundError: there is no such plan.
        """
        return view_plan(self.desk.explain(self.plan(plan_id).id))

    def newest_plans(self) -> Sequence[PlanInfo]:
        """Return some plans to choose from."""
        return self.store.plan_page(limit=50)

    def observations(self, plan_id: str | None) -> tuple[Kept[Observation], ...]:
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
