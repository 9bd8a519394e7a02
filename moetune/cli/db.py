"""`moetune db`: the database of profiles, plans and observations."""

from pathlib import Path

from moetune.cli.commands import argument, command, group, option
from moetune.cli.session import Session
from moetune.domain.errors import MoetuneError, SchemaMismatchError
from moetune.domain.units import format_bytes, parse_age
from moetune.report.section import plural


@command("moetune db upgrade")
def upgrade(session: Session) -> None:
    """Bring the database to this version's schema, or make a new one."""
    from moetune import store

    before, after = store.upgrade(session.settings.db)
    location = session.location
    words = f"upgraded {location} from schema {before} to {after}"
    if before == after:
        words = f"{location} has schema {after} already"
    elif before is None:
        words = f"made {location} with schema {after}"
    document = {"schema": "moetune.db.upgrade/1", "location": location, "from": before, "to": after}
    session.screen.result(document, words)


@command("moetune db current")
def current(session: Session) -> int:
    """Print the database's schema and the one that this version needs."""
    from moetune import store

    state, location = store.current(session.settings.db), session.location
    words = f"{location} has schema {state.revision}, this moetune needs {state.head}"
    if state.revision is None:
        words = f"there is no database at {location} yet"
    document = {"schema": "moetune.db.current/1", "location": location}
    session.screen.result({**document, "revision": state.revision, "wanted": state.head}, words)
    if state.revision is None or state.up_to_date:
        return 0
    session.screen.note("run `moetune db upgrade`")
    return SchemaMismatchError.exit_code


@command("moetune db check")
def check(session: Session) -> int:
    """Check the database for damage: pages, references, schema, and every stored document."""
    from moetune import store

    problems = store.check(session.settings.db)
    document = {"schema": "moetune.db.check/1", "location": session.location}
    words = problems or ("no problems found",)
    session.screen.result({**document, "problems": problems}, *words)
    if not store.current(session.settings.db).up_to_date:
        return SchemaMismatchError.exit_code
    return MoetuneError.exit_code if problems else 0


@command(
    "moetune db backup moetune-backup.db",
    argument("target", "New file to copy the database to.", Path),
)
def backup(session: Session, target: Path) -> None:
    """Copy a SQLite database to a new file; others may use it meanwhile."""
    from moetune import store

    file, location = store.backup(session.settings.db, target), session.location
    document = {"schema": "moetune.db.backup/1", "location": location, "file": str(file)}
    session.screen.result(document, f"copied {location} to {file}")


@command(
    "moetune db prune --older-than 90d --dry-run",
    option("--older-than", "Age from which rows are deleted: 90d, 12h.", parse_age, required=True),
    option("--dry-run", "Count, and delete nothing.", bool),
)
def prune(session: Session, older_than: float, *, dry_run: bool) -> None:
    """Delete old observations, and old plans under which nothing newer was observed.

    Profiles and their measurements stay.
    """
    from moetune.app import library

    with session.made_store() as store:
        removed = library.prune(store, older_than_seconds=older_than, dry_run=dry_run)
        size_bytes = store.size_bytes()
    document = {"schema": "moetune.db.prune/1", "location": session.location, "dry_run": dry_run}
    session.screen.result(
        {**document, "removed": removed, "size_bytes": size_bytes},
        f"{'would remove' if dry_run else 'removed'} {plural(removed.plans, 'plan')}, "
        f"{plural(removed.observations, 'observation')} and "
        f"{plural(removed.settled, 'settled size')}; the rows take {format_bytes(size_bytes)}",
    )


db = group(
    "The database of profiles, plans and observations.",
    upgrade, current, check, backup, prune,
)  # fmt: skip
