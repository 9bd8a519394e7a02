"""`moetune plans`: list, show, export, compare and remove stored plans."""

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.completers import model_names, plan_ids, profile_names
from moetune.cli.session import (
    MOST_ROWS,
    All,
    Json,
    PlanArgument,
    ProfileOption,
    example,
    session_of,
)
from moetune.domain.units import parse_age
from moetune.report.section import Section, plural

app = typer.Typer(help="Stored plans.", rich_markup_mode=None)


@app.command("list", epilog=example("moetune plans list --model gpt-xl --newer-than 7d"))
def list_(
    context: typer.Context,
    *,
    model: Annotated[
        str | None, typer.Option(autocompletion=model_names, help="Only plans for this model.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(autocompletion=profile_names, help="Only plans with this profile.")
    ] = None,
    newer_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only plans made since: 12h, 7d.")
    ] = None,
    all_: All = False,
    json: Json = False,
) -> None:
    """List the plans of the store, newest first."""
    from moetune.app.library import read_plans, time_ago
    from moetune.app.views.stored_plans import stored_plans_table

    session = session_of(context, all_rows=all_)
    since = "" if newer_than is None else time_ago(parse_age(newer_than))
    with session.find_store() as store:
        found = store.plans(model=model, profile=profile, since=since) if store else ()
        shown = found if all_ or json else found[:MOST_ROWS]
        read = read_plans(store, shown)
    document = {"schema": "moetune.plans.list/1", "plans": found}
    none = "No plan matches; `moetune plan` makes one."
    table = stored_plans_table(read, empty=none, num_more=len(found) - len(shown))
    session.screen.answer((Section(name="plans", tables=(table,)),), document, as_json=json)


@app.command("show", epilog=example("moetune plans show 1a2b3c"))
def show(
    context: typer.Context, plan: PlanArgument, profile: ProfileOption = None, *, json: Json = False
) -> None:
    """Show a plan as `moetune plan` printed it."""
    from moetune.app.files import find_plan
    from moetune.app.planner import local_planner
    from moetune.app.views.plan import plan_sections

    session = session_of(context)
    found = find_plan(plan, stores=session.find_store)
    if json:
        session.screen.document(found)
        return
    with local_planner(session.settings, profile=profile) as planner:
        session.screen.answer(plan_sections(planner.explain(found)))


@app.command("export", epilog=example("moetune plans export 1a2b3c --output plan.json"))
def export(
    context: typer.Context,
    plan: PlanArgument,
    *,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write this file instead of stdout.")
    ] = None,
    json: Json = False,
) -> None:
    """Print a plan as the JSON file that the runtime reads, or write a file."""
    from moetune.app.files import find_plan, write_text

    session = session_of(context)
    found = find_plan(plan, stores=session.find_store)
    if output is None:
        typer.echo(found.text, nl=False)
        return
    write_text(output, found.text)
    if json:
        document = {"schema": "moetune.plans.export/1", "id": found.id, "file": str(output)}
        session.screen.document(document)
    else:
        session.screen.note(f"plan {found.id[:6]} is written to {output}")


@app.command("diff", epilog=example("moetune plans diff 1a2b3c plan.json"))
def diff(
    context: typer.Context,
    first: PlanArgument,
    second: PlanArgument,
    *,
    all_: All = False,
    json: Json = False,
) -> None:
    """Say how two plans differ, and show every field in which they do."""
    from moetune.app.files import find_plan
    from moetune.app.views.comparison import comparison_sections

    session = session_of(context, all_rows=all_)
    left, right = (find_plan(one, stores=session.find_store) for one in (first, second))
    names = (left.id[:6], right.id[:6]) if left.id != right.id else (first, second)
    document = {"schema": "moetune.plans.diff/1", "first": left.id, "second": right.id}
    sections = comparison_sections(left, right, names=names)
    session.screen.answer(sections, document, as_json=json)


@app.command("remove", epilog=example("moetune plans remove 1a2b3c"))
def remove(
    context: typer.Context,
    plans: Annotated[
        list[str],
        typer.Argument(metavar="PLAN...", autocompletion=plan_ids, help="Beginnings of ids."),
    ],
    *,
    json: Json = False,
) -> None:
    """Delete plans, and what was observed under them."""
    from moetune.app import wiring
    from moetune.app.library import plan_ids

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
