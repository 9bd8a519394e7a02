"""Pages of plans: the list, a plan, and the comparison of two."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

from moetune.app.library import read_plans
from moetune.app.planner import ServicePlanner
from moetune.app.subjects import Subject
from moetune.app.views.comparison import comparison_sections
from moetune.app.views.observed import observed_sections
from moetune.app.views.plan import plan_sections
from moetune.app.views.stored_plans import stored_plans_table
from moetune.app.whatif import arguments_of
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import NotFoundError
from moetune.domain.model import MODELS
from moetune.domain.training_document import TrainingDocument
from moetune.huggingface.registry import whole_names
from moetune.report.section import Section
from moetune.service.pages.library import model_name, plan_field, profile_names, stored_profile
from moetune.service.pages.page import Field, Form, Link, Page, Text, address

PAGE_SIZE = 50


def plans_page(
    planner: ServicePlanner, *, after: Text = "", model: Text = "", profile: Text = ""
) -> Page:
    """Return a page of plans, or the first steps; raise NotFoundError if `after` is no plan."""
    store = planner.reading
    if not (store.plans(limit=1) or store.runs()):
        return Page(template="empty.html", title="Nothing measured yet", here="plans")
    query = {"model": model, "profile": profile}
    infos = store.plans(model=model or None, profile=profile or None, after=after, limit=PAGE_SIZE)
    older = infos[-1].id if len(infos) == PAGE_SIZE else ""
    stored = read_plans(store, infos)
    table = stored_plans_table(stored, empty="No plan matches.", address=address)
    return Page(
        title="Plans",
        here="plans",
        forms=(Form(action="/", button="Filter", fields=_filter_fields(planner), values=query),),
        sections=(Section(name="plans", tables=(table,)),),
        newer=address("", **query) if after else "",
        older=address("", after=older, **query) if older else "",
    )  # fmt: skip


def _filter_fields(planner: ServicePlanner) -> tuple[Field, ...]:
    names = {"model": (*MODELS, *whole_names()), "profile": profile_names(planner)}
    return tuple(
        Field(
            name=name, label=name.capitalize(), placeholder="all",
            suggested=dict.fromkeys(texts, ""),
        )
        for name, texts in names.items()
    )  # fmt: skip


def plan_page(planner: ServicePlanner, plan_id: str) -> Page:
    """Return the page of one plan, or raise NotFoundError."""
    plan = planner.sources.plan(plan_id)
    subject = planner.explain(plan)
    sections = plan_sections(subject, is_page=True)
    observed = observed_sections(planner.reading, plan)
    model = model_name(plan)
    return Page(
        title=f"{sections[0].title}, plan {plan.id[:6]}",
        here="plans",
        scope=f"{sections[0].scope} · profile {plan.inputs.profile} · plan {plan.id[:12]}",
        links=tuple(_plan_links(planner, subject, model)),
        sections=(*sections, *observed),
        commands=_commands(plan, model),
    )


def _plan_links(planner: ServicePlanner, subject: Subject, model: str | None) -> Iterator[Link]:
    plan = subject.plan
    if plan.kind == "training" and model:
        yield Link(name="New plan like this", href=_asked_anew(planner, plan, model))
    yield Link(name="Compare", href=address("compare", first=plan.id))
    yield Link(name="Profile", href=address("profiles", plan.inputs.profile))
    document, short = address("v1", "plans", plan.id), plan.id[:6]
    yield Link(name="Plan file", href=document, file=f"plan-{short}.json")
    if plan.kind != "training" or (model and subject.profile is not None):
        file = f"trace-{short}.json"
        yield Link(name="Trace for Perfetto", href=f"{document}/trace", file=file)


def _commands(plan: AnyPlan, model: str | None) -> Mapping[str, str]:
    """Return the commands that may follow a plan, by their descriptions."""
    name, change = plan.id[:12], "Change its question, such as its ranks"
    whatif = f"moetune whatif {name} --world-size {2 * plan.inputs.world_size}"
    if plan.kind != "training":
        return {
            "Run it and its alternatives": f"moetune verify {name}",
            "Ask why": f"moetune explain {name}", change: whatif,
        }  # fmt: skip
    # A pasted configuration has no path: the page says to save it under the model's name.
    is_named = model or plan.inputs.model_path
    config = "" if is_named else f" --model {plan.inputs.model}/config.json"
    return {
        f"Give it to {plan.target}": f"moetune export {name} --target {plan.target}{config}",
        "Ask why, and why not another layout": f"moetune explain {name}{config}",
        "See what the step depends on": f"moetune sensitivity {name}{config}",
        change: f"{whatif}{config}",
        "Hold its run against it, which calibrates later plans":
            f"moetune observe {name} --log train.log{config}",
    }  # fmt: skip


def _asked_anew(planner: ServicePlanner, plan: TrainingDocument, model: str) -> str:
    inputs = plan.inputs
    machine = None
    with suppress(NotFoundError):
        machine = stored_profile(planner, inputs.profile).profile
    asked = arguments_of(inputs, machine) | {"model": model, "profile": inputs.profile}
    texts = {name: _text(value) for name, value in asked.items() if value is not None}
    if limit := asked["memory_limit"]:
        texts["memory_limit"] = f"{limit}B"
    return address("new", **texts)


def _text(value: object) -> str:
    return ",".join(value) or "none" if isinstance(value, list) else str(value)


def compare_page(planner: ServicePlanner, *, first: Text = "", second: Text = "") -> Page:
    """Return the form, and how two plans differ; raise NotFoundError if a plan is missing."""
    sections: tuple[Section, ...] = ()
    links: tuple[Link, ...] = ()
    if first and second:
        plans = planner.sources.plan(first), planner.sources.plan(second)
        names = plans[0].id[:6], plans[1].id[:6]
        sections = comparison_sections(*plans, names=names)
        links = tuple(Link(name=plan.id[:6], href=address("plans", plan.id)) for plan in plans)
    form = Form(
        action="/compare",
        button="Compare",
        fields=tuple(
            plan_field(planner, name, f"{name.capitalize()} plan") for name in ("first", "second")
        ),
        values={"first": first[:12], "second": second[:12]},
    )  # fmt: skip
    return Page(
        title="Compare two plans", here="compare", links=links, forms=(form,), sections=sections
    )
