"""`moetune db`: the database of profiles, plans and observed runs."""

from moetune.cli.commands import command, group, option
from moetune.cli.options import removed_words
from moetune.cli.session import Session
from moetune.domain.errors import MoetuneError, SchemaMismatchError
from moetune.domain.units import parse_age


@command("moetune db upgrade")
def upgrade(session: Session) -> None:
    """Bring the database to this version's schema, or make a new database."""
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


@command("moetune db check")
def check(session: Session) -> int:
    """Check the database for damage: pages, references, schema, and every stored document."""
    from moetune import store

    problems = store.check(session.settings.db)
    document = {"schema": "moetune.db.check/1", "location": session.location}
    words = problems or ("no problems",)
    session.screen.result({**document, "problems": problems}, *words)
    if not store.current(session.settings.db).up_to_date:
        return SchemaMismatchError.exit_code
    return MoetuneError.exit_code if problems else 0


@command(
    "moetune db prune --older-than 90d --dry-run",
    option("--older-than", "Age from which rows are deleted: 90d, 12h.", parse_age, required=True),
    option("--dry-run", "Count, and delete nothing.", bool),
)
def prune(session: Session, older_than: float, *, dry_run: bool) -> None:
    """Delete old plans under which nothing newer was settled, and old settled sizes.

    Profiles, their measurements and observed runs stay.
    """
    from moetune.app.library import time_ago

    with session.made_store() as store:
        removed = store.prune(time_ago(older_than), dry_run=dry_run)
    document = {"schema": "moetune.db.prune/1", "location": session.location, "dry_run": dry_run}
    session.screen.result(
        {**document, "removed": removed},
        f"{'would remove' if dry_run else 'removed'} {removed_words(removed)}",
    )


db = group(
    "The database of profiles, plans and observed runs.",
    upgrade, check, prune,
)  # fmt: skip
