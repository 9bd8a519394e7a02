"""`moetune plans`: list and remove stored plans."""

from typing import Annotated

import typer

from moetune.cli.session import Json, example, session_of
from moetune.domain.units import parse_seconds
from moetune.report.section import plural

app = typer.Typer(help="Stored plans.", rich_markup_mode=None)


@app.command("list", epilog=example("moetune plans list --model gpt-xl --newer-than 7d"))
def list_(
    context: typer.Context,
    *,
    model: Annotated[str | None, typer.Option(help="Only plans for this model.")] = None,
    profile: Annotated[str | None, typer.Option(help="Only plans with this profile.")] = None,
    newer_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only plans made since: 12h, 7d.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Print every row.")] = False,
    json: Json = False,
) -> None:
    """List the plans of the store, newest first."""
    from moetune.workflows.library import PlanFilter, list_plans, time_ago
    from moetune.workflows.views.library import MOST_ROWS, plans_section

    session = session_of(context)
    since = "" if newer_than is None else time_ago(parse_seconds(newer_than))
    wanted = PlanFilter(model=model, profile=profile, since=since)
    with session.find_store() as store:
        found = list_plans(store, wanted)
    document = {"schema": "moetune.plans.list/1", "plans": found}
    section = plans_section(found, most=None if all_ else MOST_ROWS)
    session.screen.answer((section,), document, as_json=json)


@app.command("remove", epilog=example("moetune plans remove 1a2b3c"))
def remove(
    context: typer.Context,
    plans: Annotated[list[str], typer.Argument(metavar="PLAN...", help="Beginnings of ids.")],
    *,
    json: Json = False,
) -> None:
    """Delete plans, and what was observed under them."""
    from moetune.workflows import wiring
    from moetune.workflows.library import plan_ids

    session = session_of(context)
    with session.find_store() as existing:  # a command that removes must not make a database
        wanted = plan_ids(existing, plans)
    with wiring.open_store(session.settings) as store:
        removed = store.remove_plans(wanted)
    if json:
        session.screen.document({"schema": "moetune.plans.remove/1", "removed": removed})
    else:
        session.screen.line(
            f"removed {plural(removed.plans, 'plan')}, with "
            f"{plural(removed.observations, 'observation')} and "
            f"{plural(removed.settled, 'settled size')}"
        )
