"""`moetune report`: a profile, plans and their observed steps as one HTML file."""

from collections.abc import Sequence
from pathlib import Path

from moetune.cli.commands import command, option
from moetune.cli.completion import plan_ids
from moetune.cli.options import PROFILE
from moetune.cli.session import Session
from moetune.domain.document import encode
from moetune.report.section import plural


@command(
    "moetune report --plan 3f9c21 --output report.html",
    option(
        "--plan",
        "A plan's file, or the beginning of its id; can be repeated. Default: the newest five.",
        form="FILE|ID",
        names=plan_ids,
        multiple=True,
    ),
    PROFILE,
    option("--output", "File to write.", Path, default="report.html"),
)
def report(session: Session, plan: Sequence[str], profile: str | None, output: Path) -> None:
    """Draw a profile and plans in one HTML file.

    With the profile's operations, and the observed steps of the plans.
    """
    from datetime import UTC, datetime
    from importlib.metadata import version

    from moetune.app.report import write_report

    written = write_report(
        output,
        profile=profile,
        default=session.settings.profile,
        plans=plan,
        stores=session.find_store,
        now=datetime.now(UTC),
        version=version("moetune"),
    )
    plans = plural(len(written.plans), "plan")
    machine = f"Profile {written.profiles[0]} and " if written.profiles else ""
    session.screen.result(
        {"schema": "moetune.report/1", **encode(written), "file": str(written.file)},
        f"{machine}{plans} in {output}. "
        "Open it in a browser; it needs no other file and no network.",
    )
