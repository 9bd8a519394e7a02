"""Look-ups of pages in the planner's store: profiles by name, their summaries, names to choose."""

from functools import lru_cache
from typing import NamedTuple

from moetune.app.planner import ServicePlanner
from moetune.app.profiles import ResolvedProfile, list_profiles
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import NotFoundError, ProfileError
from moetune.domain.model import MODELS
from moetune.fit.quality import quality_of
from moetune.huggingface.registry import known_name
from moetune.service.pages.page import Field

_REFERENCE = "h100-x8"
"""Reference machine of whole models."""
_MOST_SUMMARIES = 1000


class Summary(NamedTuple):
    """A profile in a list; `quality` is that of its worst operations, "" if unknown."""

    citation: str
    quality: str


def stored_profile(planner: ServicePlanner, name: str) -> ResolvedProfile:
    """Return the stored or reference profile of a name; raise NotFoundError, also for a path."""
    try:
        return planner.sources.profile(name)
    except ProfileError as error:
        raise NotFoundError(error.what, error.hint) from None


def summary_of(planner: ServicePlanner, name: str) -> Summary | None:
    """Return a profile's summary, computed once for each fit; None before its first fit."""
    try:
        return _summarized(planner, name, planner.reading.current_fit(name))
    except NotFoundError:
        return None


@lru_cache(_MOST_SUMMARIES)
def _summarized(planner: ServicePlanner, name: str, _fit: int | None) -> Summary:
    profile = stored_profile(planner, name).profile
    quality = quality_of(profile)
    return Summary(citation=profile.citation, quality=quality.label if quality else "")


def profile_names(planner: ServicePlanner) -> tuple[str, ...]:
    """Return the names of the store's profiles, newest first, then of the bundled profiles."""
    return tuple(dict.fromkeys(info.name for info in list_profiles(planner.reading)))


def machine_field(planner: ServicePlanner) -> Field:
    """Return the field of a form that chooses a machine."""
    return Field(
        name="profile", label="Machine", hint="measured or reference", flag="--profile",
        choices=profile_names(planner),
    )  # fmt: skip


def usual_profile(planner: ServicePlanner, *, for_models: bool = False) -> str:
    """Return the name of the default profile (of GPUs for models), or of a reference machine."""
    try:
        return planner.sources.profile(None, for_models=for_models).profile.name
    except ProfileError:
        return _REFERENCE


def model_name(plan: AnyPlan) -> str | None:
    """Return the name of a plan's model; None if only a file describes it."""
    model = plan.inputs.model
    return model if model is None or model in MODELS else known_name(model)


def plan_field(planner: ServicePlanner, name: str, label: str) -> Field:
    """Return a form's field for a plan's id, which suggests and describes the newest 50 plans."""
    suggested = {
        plan.id[:12]: f"{plan.model or 'layer'} · {plan.world_size:,} ranks · "
        f"{plan.tokens_per_rank:,} tokens · {plan.profile}"
        for plan in planner.reading.plans(limit=50)
    }
    return Field(
        name=name, label=label, placeholder="3f9c21", is_required=True, suggested=suggested
    )
