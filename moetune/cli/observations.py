"""`moetune observations`: list and remove the steps that were observed under plans."""

from typing import Annotated

import typer

from moetune.cli.completers import plan_ids
from moetune.cli.session import All, Json, example, session_of
from moetune.domain.document import encode
from moetune.domain.errors import NotFoundError
from moetune.report.section import plural

app = typer.Typer(help="Observed steps of plans.", rich_markup_mode=None)


@app.command("list", epilog=example("moetune observations list --plan 1a2b3c"))
def list_(
    context: typer.Context,
    *,
    plan: Annotated[
        str | None, typer.Option(autocompletion=plan_ids, help="Beginning of a plan's id.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Most, the newest first.")] = 1000,
    all_: All = False,
    json: Json = False,
) -> None:
    """List the newest observations, newest first."""
    from moetune.app.library import list_observations
    from moetune.app.views.observed import observations_section

    session = session_of(context, all_rows=all_)
    with session.find_store() as store:
        found = list_observations(store, plan, limit=limit)
    rows = [{"id": one.id, "created_at": one.created_at, **encode(one.value)} for one in found]
    document = {"schema": "moetune.observations.list/1", "observations": rows}
    section = observations_section(found)
    session.screen.answer((section,), document, as_json=json)


@app.command("remove", epilog=example("moetune observations remove 17"))
def remove(
    context: typer.Context,
    observations: Annotated[list[int], typer.Argument(metavar="ID...", help="As listed.")],
    *,
    json: Json = False,
) -> None:
    """Delete observations."""
    from moetune.app import wiring

    session = session_of(context)
    with session.find_store() as existing:  # a command that removes must not make a database
        if existing is None:
            raise NotFoundError(
                f"there is no observation {observations[0]}", "there is no database"
            )
    with wiring.open_store(session.settings) as store:
        count = store.remove_observations(observations)
    document = {"schema": "moetune.observations.remove/1", "removed": count}
    session.screen.said(document, f"removed {plural(count, 'observation')}", as_json=json)
