"""`moetune plans` and `moetune observations`: the plans and the runs of the store."""

from collections.abc import Sequence

from moetune.cli.commands import ALL, MOST_ROWS, Between, argument, command, group, option
from moetune.cli.completion import model_names, plan_ids, profile_names
from moetune.cli.options import PLAN, PROFILE, plan_argument, removed_words
from moetune.cli.session import Session
from moetune.domain.errors import NotFoundError
from moetune.domain.units import parse_age
from moetune.report.section import Section, plural


@command(
    "moetune plans list --model gpt-xl --newer-than 7d",
    option("--model", "Only plans for this model.", names=model_names),
    option("--profile", "Only plans with this profile.", names=profile_names),
    option("--newer-than", "Only plans made since: 12h, 7d.", parse_age),
    ALL,
)
def list_(
    session: Session, model: str | None, profile: str | None, newer_than: float | None
) -> None:
    """List the plans of the store, newest first."""
    from moetune.app.library import read_plans, time_ago
    from moetune.app.views.stored_plans import stored_plans_table

    since = "" if newer_than is None else time_ago(newer_than)
    with session.find_store() as store:
        plans = store.plans(model=model, profile=profile, since=since) if store else ()
        shown = plans[:MOST_ROWS] if session.most_rows and not session.as_json else plans
        read = read_plans(store, shown)
    none = "No plan matches; `moetune plan` makes plans."
    table = stored_plans_table(read, empty=none, num_more=len(plans) - len(shown))
    document = {"schema": "moetune.plans.list/1", "plans": plans}
    session.screen.answer((Section(name="plans", tables=(table,)),), document)


@command("moetune plans show 1a2b3c", PLAN, PROFILE)
def show(session: Session, plan: str, profile: str | None) -> None:
    """Show a plan as `moetune plan` printed it."""
    from moetune.app.views.plan import plan_sections

    wanted = session.plan(plan)
    with session.planner(profile) as planner:
        session.screen.show(wanted, lambda: plan_sections(planner.explain(wanted)))


@command(
    "moetune plans diff 1a2b3c plan.json", plan_argument("first"), plan_argument("second"), ALL
)
def diff(session: Session, first: str, second: str) -> None:
    """Say how two plans differ: what was asked, what they decide, and where their time goes."""
    from moetune.app.views.comparison import comparison_sections

    left, right = session.plan(first), session.plan(second)
    names = (left.id[:6], right.id[:6]) if left.id != right.id else (first, second)
    document = {"schema": "moetune.plans.diff/1", "first": left.id, "second": right.id}
    session.screen.answer(comparison_sections(left, right, names=names), document)


@command(
    "moetune plans remove 1a2b3c",
    argument("plans", "Beginnings of ids.", form="PLAN...", names=plan_ids, multiple=True),
)
def remove(session: Session, plans: Sequence[str]) -> None:
    """Delete plans, and the sizes that were settled under them."""
    with session.made_store() as store:
        removed = store.remove_plans([*map(store.plan_id, plans)])
    session.screen.result(
        {"schema": "moetune.plans.remove/1", "removed": removed},
        f"removed {removed_words(removed)}",
    )


plans = group("Stored plans.", list_, show, diff, remove)


@command(
    "moetune observations list --plan 1a2b3c",
    option("--plan", "Beginning of a plan's id.", names=plan_ids),
    option("--limit", "Most, the newest first.", Between(1, 100_000), default=1000),
    ALL,
)
def list_observations(session: Session, plan: str | None, limit: int) -> None:
    """List the newest observed runs, newest first."""
    from moetune.app.views.observed import runs_section, stored_documents

    with session.find_store() as store:
        if store is None and plan:
            raise NotFoundError(f"no plan has an id that begins with {plan!r}")
        plan_id = store.plan_id(plan) if store and plan else None
        runs = store.observed_runs(plan_id=plan_id, limit=limit) if store else ()
    document = {"schema": "moetune.observations.list/1", "runs": stored_documents(runs)}
    session.screen.answer((runs_section(runs),), document)


@command(
    "moetune observations remove r3",
    argument("runs", "Numbers as listed, such as r3.", form="ID...", multiple=True),
)
def remove_observations(session: Session, runs: Sequence[str]) -> None:
    """Delete observed runs."""
    from moetune.app.library import run_numbers

    numbers = run_numbers(runs)
    with session.made_store() as store:
        count = store.remove_observed_runs(numbers)
    document = {"schema": "moetune.observations.remove/1", "removed": count}
    session.screen.result(document, f"removed {plural(count, 'observed run')}")


observations = group("Observed runs of models.", list=list_observations, remove=remove_observations)
