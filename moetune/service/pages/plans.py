"""Pages of plans: the list, one plan, and two plans or profiles side by side."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from moetune.app.library import StoredPlan, read_plans
from moetune.app.models import whole_names
from moetune.app.views.comparison import comparison_sections, machine_sections
from moetune.app.views.plan import plan_sections
from moetune.app.views.stored_plans import stored_plans_table
from moetune.app.views.words import KINDS
from moetune.app.whatif import arguments_of
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import InputError, NotFoundError
from moetune.domain.model import MODELS
from moetune.domain.training_document import TrainingDocument
from moetune.report.observed import drift_figure, sound_rows
from moetune.report.section import Section, Table
from moetune.service.pages.library import Library
from moetune.service.pages.page import Field, Link, Page, Text, address
from moetune.service.pages.whatif import whatif_fields

PAGE_SIZE = 50


def plans_page(
    library: Library,
    *,
    after: Text = "",
    model: Text = "",
    profile: Text = "",
    kind: Text = "",
) -> Page:
    """Return a page of the plans that are wanted, newest first; of an empty store the first steps.

    Args:
        kind: one of `KINDS`; "" for every one, as of the model and the profile.

    Raises:
        InputError: there is no such kind.
        NotFoundError: there is no plan `after`.
    """
    if kind and kind not in KINDS:
        raise InputError(f"kind must be {', '.join(KINDS)} or empty, got {kind!r}")
    if library.is_empty:
        return Page(template="empty.html", title="Nothing measured yet", here="plans")
    query = {"model": model, "profile": profile, "kind": kind}
    seen_infos = library.store.plans(  # kinds stand in the documents, which are not looked at
        model=model or None, profile=profile or None, after=after, limit=PAGE_SIZE
    )
    found = read_plans(library.store, seen_infos)
    shown = [one for one in found if kind in {"", one.plan and one.plan.kind}]
    older = seen_infos[-1].id if len(seen_infos) == PAGE_SIZE else ""
    return Page(
        template="plans.html",
        title="Plans",
        here="plans",
        sections=(Section(name="plans", tables=(_table(shown, is_last=not older),)),),
        context={
            "values": query,
            "fields_of": _filter_fields(library),
            "newer": address("", **query) if after else "",
            "older": address("", after=older, **query) if older else "",
        },
    )


def _filter_fields(library: Library) -> tuple[Field, ...]:
    models, profiles = (*MODELS, *whole_names()), library.profile_names()
    return (
        Field(name="model", label="Model", placeholder="all", suggested=dict.fromkeys(models, "")),
        Field(
            name="profile", label="Profile", placeholder="all",
            suggested=dict.fromkeys(profiles, ""),
        ),
        Field(name="kind", label="Kind", placeholder="all", choices=KINDS),
    )  # fmt: skip


def plan_page(library: Library, plan_id: str) -> Page:
    """Return the page of one plan.

    Raises:
        NotFoundError: there is none.
    """
    plan = library.any_plan(plan_id)
    name = plan.id[:12]
    sections = plan_sections(library.planner.explain(plan), is_page=True)
    found = sound_rows(library.store.observation_page(plan.id, limit=500))
    figures = (drift_figure(found),) if found else ()
    observed = Section(name="observed", title="Observed steps", figures=figures)
    known = library.model_name(plan)
    return Page(
        template="plan.html",
        title=f"{sections[0].title}, plan {plan.id[:6]}",
        here="plans",
        sections=(*sections, *((observed,) if found else ())),
        csv=lambda figure: f"/plans/{plan.id}/{figure.name}.csv",
        context={
            "fields_of": whatif_fields(plan),
            "plan": plan,
            "profile_address": address("profiles", plan.inputs.profile),
            "links": tuple(_plan_links(library, plan, known)),
            "commands": {
                words: f"moetune {command} {name}{more}"
                for words, (command, more) in _commands(plan, known).items()
            },
        },
    )


def _plan_links(library: Library, plan: AnyPlan, model: str | None) -> Iterator[Link]:
    """Yield the links under a plan's title.

    Args:
        model: the name of a model that has a page.
    """
    yield Link(name="What if", href="#whatif")
    if plan.kind == "training" and model:
        yield Link(name="New plan like this", href=_asked_anew(library, plan, model))
    yield Link(name="Compare", href=address("compare", what="plans", first=plan.id))
    yield Link(name="Observed", href=address("observed", plan=plan.id))
    if model:
        yield Link(name="Model", href=address("models", model))
    document, short = address("v1", "plans", plan.id), plan.id[:6]
    yield Link(name="Plan file", href=document, file=f"plan-{short}.json")
    if _has_trace(library, plan, model):
        file = f"trace-{short}.json"
        yield Link(name="Trace for Perfetto", href=f"{document}/trace", file=file)


def _has_trace(library: Library, plan: AnyPlan, model: str | None) -> bool:
    if plan.kind == "training":
        return bool(model) and library.planner.explain(plan).profile is not None
    return True


def _commands(plan: AnyPlan, model: str | None) -> Mapping[str, tuple[str, str]]:
    """Return what to do with a plan: commands, and what follows the plan's id in them."""
    if plan.kind != "training":
        return {"Run it and its alternatives": ("verify", ""), "Ask why": ("explain", "")}
    # A pasted configuration has no path: the page says to save it under the model's name.
    is_named = model or plan.inputs.model_path
    config = "" if is_named else f" --model {plan.inputs.model}/config.json"
    target = plan.target
    return {
        f"Give it to {target}": ("export", f" --target {target}{config}"),
        "Ask why, and why not another layout": ("explain", config),
        "See what the step depends on": ("sensitivity", config),
    }


def _asked_anew(library: Library, plan: TrainingDocument, model: str) -> str:
    """Return the address of New plan with the plan's question."""
    inputs = plan.inputs
    machine = None
    with suppress(NotFoundError):
        machine = library.profile(inputs.profile).profile
    asked = arguments_of(plan, machine) | {"model": model, "profile": inputs.profile}
    texts = {name: _text(value) for name, value in asked.items() if value is not None}
    if limit := asked["memory_limit"]:
        texts["memory_limit"] = f"{limit}B"
    return address("new", **texts)


def _text(value: object) -> str:
    """Return the text of an argument, of a list of modules as a flag has it."""
    return ",".join(value) or "none" if isinstance(value, list) else str(value)


def compare_page(
    library: Library, *, what: Text = "plans", first: Text = "", second: Text = ""
) -> Page:
    """Return the form, and with two names the comparison.

    Args:
        what: "plans" or "profiles".
        first, second: plans' ids or their beginnings, or profiles' names.

    Raises:
        InputError: `what` is something else.
        NotFoundError: one of the two does not exist.
    """
    if what not in {"plans", "profiles"}:
        raise InputError(f"what must be plans or profiles, got {what!r}")
    names: tuple[str, str] = (first, second)
    sections: tuple[Section, ...] = ()
    longest = 12 if what == "plans" else None
    if first and second:
        compare = _plans if what == "plans" else _profiles
        names, sections = compare(library, first, second)
    return Page(
        template="compare.html",
        title="Compare",
        here="compare",
        sections=sections,
        csv=lambda figure: address(
            "compare", f"{figure.name}.csv", what=what, first=first, second=second
        ),
        context={
            "what": what,
            "fields_of": tuple(_compared_fields(library, what)),
            "values": {"first": first[:longest], "second": second[:longest]},
            "names": names,
            "links": [address(what, first), address(what, second)],
        },
    )


def _compared_fields(library: Library, what: str) -> Iterator[Field]:
    for name in ("first", "second"):
        label = f"{name.capitalize()} {what.removesuffix('s')}"
        if what == "plans":
            yield library.plan_field(name, label)
        else:
            yield Field(
                name=name, label=label, choices=library.profile_names(), placeholder="Choose",
                is_required=True,
            )  # fmt: skip


_Comparison = tuple[tuple[str, str], tuple[Section, ...]]


def _plans(library: Library, first: str, second: str) -> _Comparison:
    left, right = library.any_plan(first), library.any_plan(second)
    names = left.id[:6], right.id[:6]
    return names, comparison_sections(left, right, names=names, is_drawn=True)


def _profiles(library: Library, first: str, second: str) -> _Comparison:
    left, right = (library.profile(name).profile for name in (first, second))
    names = left.name, right.name
    return names, machine_sections(left, right, names=names, is_drawn=True)


def _table(found: Sequence[StoredPlan], *, is_last: bool) -> Table:
    none = "No plan matches." if is_last else "No plan on this page matches: see older ones."
    return stored_plans_table(found, empty=none, address=address)
