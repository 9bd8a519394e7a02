"""Read access of the pages: profiles by name, plans by id, observations."""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from moetune.app.files import bundled_profiles
from moetune.app.planner import ServicePlanner
from moetune.app.profile_quality import quality_of
from moetune.app.profiles import FoundProfile
from moetune.app.views.profile import machine_scope
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import NotFoundError, ProfileError
from moetune.domain.model import MODELS, WHOLE_MODELS
from moetune.domain.records import FitInfo, PlanInfo
from moetune.huggingface.registry import resolve_name
from moetune.service.pages.page import Field

if TYPE_CHECKING:
    from moetune.store import SqlStore

_MOST_SUMMARIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A profile in a list.

    Args:
        quality: of its worst group of operations; "" where none is known.
    """

    provenance: str
    citation: str
    scope: str
    quality: str


class Library:
    """Look-ups in the planner's store for pages; threads share it."""

    def __init__(self, planner: ServicePlanner) -> None:
        self.planner = planner
        self._summary = lru_cache(_MOST_SUMMARIES)(self._summarize)

    @property
    def store(self) -> "SqlStore":
        """The store, opened read-only."""
        return self.planner.reading

    @property
    def is_empty(self) -> bool:
        """Whether the store has no machine, profile or plan."""
        store = self.store
        return not (store.plans(limit=1) or store.fits(limit=1) or store.machines(limit=1))

    def profile(self, name: str) -> FoundProfile:
        """Return the profile of this name in the store, else of the reference machine.

        A name that looks like a path does not reach files of the service's machine.

        Raises:
            NotFoundError: there is none.
        """
        try:
            return self.planner.sources.profile(name)
        except ProfileError as error:
            raise NotFoundError(error.what, error.hint) from None

    def summary(self, name: str) -> Summary:
        """Return a profile's summary, computed once for each fit.

        Raises:
            NotFoundError: there is none.
        """
        return self._summary(name, self.store.current_fit(name))

    def _summarize(self, name: str, _fit: int | None) -> Summary:
        profile = self.profile(name).profile
        quality = quality_of(profile)
        return Summary(
            provenance=profile.provenance,
            citation=profile.citation,
            scope=machine_scope(profile),
            quality=quality.label if quality else "",
        )

    def profile_names(self) -> tuple[str, ...]:
        """Return the names of the store's profiles, newest first, then of the bundled ones."""
        names = (*(fit.profile for fit in self.fits()), *bundled_profiles())
        return tuple(dict.fromkeys(names))

    def fits(self) -> tuple[FitInfo, ...]:
        """Return the newest 500 fits."""
        return self.store.fits(limit=500)

    def any_plan(self, wanted: str) -> AnyPlan:
        """Return the plan of an id or its beginning, of whichever kind.

        Raises:
            NotFoundError: there is none.
        """
        return self.planner.sources.plan(wanted)

    def model_name(self, plan: AnyPlan) -> str | None:
        """Return the name of a plan's model where it has a page."""
        model = plan.inputs.model
        return model if model is None or model in {*MODELS, *WHOLE_MODELS} else resolve_name(model)

    def plan_field(self, name: str, label: str) -> Field:
        """Return a field for a plan's id, which suggests the newest 50."""
        newest = self.store.plans(limit=50)
        return Field(
            name=name, label=label, placeholder="3f9c21", is_required=True,
            suggested={plan.id[:12]: _plan_words(plan) for plan in newest},
        )  # fmt: skip


def _plan_words(plan: PlanInfo) -> str:
    """Return a plan's line in a list: "gpt-xl · 64 ranks · 8,192 tokens · rtx2080ti-x64"."""
    return (
        f"{plan.model or 'layer'} · {plan.world_size:,} ranks · {plan.tokens_per_rank:,} tokens · "
        f"{plan.profile}"
    )
