"""`moetune db`: the database of profiles, plans and observations."""

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.session import Json, example, session_of
from moetune.domain.errors import InputError, MoetuneError, SchemaMismatchError
from moetune.domain.spelling import read_flag
from moetune.domain.units import format_bytes, parse_age
from moetune.report.section import plural

app = typer.Typer(help="The database of profiles, plans and observations.", rich_markup_mode=None)


@app.command(epilog=example("moetune db upgrade"))
def upgrade(context: typer.Context, *, json: Json = False) -> None:
    """Bring the database to this version's schema, or make a new one."""
    from moetune import store
    from moetune.config import without_password

    session = session_of(context)
    settings = session.settings
    before, after = store.upgrade(settings.db)
    location = without_password(settings.db)
    words = f"upgraded {location} from schema {before} to {after}"
    if before == after:
        words = f"{location} has schema {after} already"
    elif before is None:
        words = f"made {location} with schema {after}"
    document = {"schema": "moetune.db.upgrade/1", "location": location, "from": before, "to": after}
    session.screen.said(document, words, as_json=json)


@app.command(epilog=example("moetune db current"))
def current(context: typer.Context, *, json: Json = False) -> None:
    """Print the database's schema and the one that this version needs."""
    from moetune import store
    from moetune.config import without_password

    session = session_of(context)
    settings = session.settings
    state = store.current(settings.db)
    location = without_password(settings.db)
    words = f"{location} has schema {state.found}, this moetune needs {state.head}"
    if state.found is None:
        words = f"there is no database at {location} yet"
    document = {"schema": "moetune.db.current/1", "location": location}
    found = {"revision": state.found, "wanted": state.head}
    session.screen.said({**document, **found}, words, as_json=json)
    if state.found is not None and not state.up_to_date:
        session.screen.note("run `moetune db upgrade`")
        raise typer.Exit(SchemaMismatchError.exit_code)


@app.command(epilog=example("moetune db check"))
def check(context: typer.Context, *, json: Json = False) -> None:
    """Check the database for damage: pages, references, schema, and every stored document."""
    from moetune import store
    from moetune.config import without_password

    session = session_of(context)
    settings = session.settings
    problems = store.check(settings.db)
    state = store.current(settings.db)
    document = {"schema": "moetune.db.check/1", "location": without_password(settings.db)}
    words = problems or ("no problems found",)
    session.screen.said({**document, "problems": problems}, *words, as_json=json)
    if not state.up_to_date:
        raise typer.Exit(SchemaMismatchError.exit_code)
    if problems:
        raise typer.Exit(MoetuneError.exit_code)


@app.command(epilog=example("moetune db backup moetune-backup.db"))
def backup(
    context: typer.Context,
    target: Annotated[Path, typer.Argument(help="New file to copy the database to.")],
    *,
    json: Json = False,
) -> None:
    """Copy a SQLite database to a new file; others may use it meanwhile."""
    from moetune import store
    from moetune.config import without_password

    session = session_of(context)
    settings = session.settings
    file = store.backup(settings.db, target)
    location = without_password(settings.db)
    document = {"schema": "moetune.db.backup/1", "location": location, "file": str(file)}
    session.screen.said(document, f"copied {location} to {file}", as_json=json)


@app.command(epilog=example("moetune db prune --older-than 90d --dry-run"))
def prune(
    context: typer.Context,
    *,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Age from which rows are deleted: 90d, 12h.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and delete nothing.")] = False,
    json: Json = False,
) -> None:
    """Delete old observations, and old plans under which nothing newer was observed.

    Profiles and their measurements stay.
    """
    from moetune.app import library, wiring
    from moetune.config import without_password

    session = session_of(context)
    seconds = read_flag(older_than, parse_age, "older_than")
    location = without_password(session.settings.db)
    with session.find_store() as existing:  # a command that removes must not make a database
        if existing is None:
            raise InputError(f"there is no database at {location} yet")
    with wiring.open_store(session.settings) as store:
        found = library.prune(store, older_than_seconds=seconds, dry_run=dry_run)
        size_bytes = store.size_bytes()
    document = {"schema": "moetune.db.prune/1", "location": location, "dry_run": dry_run}
    session.screen.said(
        {**document, "removed": found, "size_bytes": size_bytes},
        f"{'would remove' if dry_run else 'removed'} {plural(found.plans, 'plan')}, "
        f"{plural(found.observations, 'observation')} and {plural(found.settled, 'settled size')}; "
        f"the rows take {format_bytes(size_bytes)}",
        as_json=json,
    )
