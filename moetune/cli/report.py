"""`moetune report`: a profile, plans and their observed steps as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.completers import plan_ids
from moetune.cli.session import Json, ProfileOption, example, session_of
from moetune.domain.document import encode
from moetune.report.section import plural

EPILOG = example("moetune report --plan 3f9c21 --output report.html")


def report(
    context: typer.Context,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            "--plan",
            metavar="FILE|ID",
            autocompletion=plan_ids,
            help="A plan's file, or the beginning of its id; can be repeated. "
            "Default: the newest five.",
        ),
    ] = None,
    profile: ProfileOption = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File to write.")] = Path(
        "report.html"
    ),
    *,
    json: Json = False,
) -> None:
    """Draw a profile and plans in one HTML file.

    With the profile's fits, and the observed steps of the plans.
    """
    from datetime import UTC, datetime
    from importlib.metadata import version

    from moetune.app.report import write_report

    session = session_of(context)
    found = write_report(
        output,
        profile=profile,
        default=session.settings.profile,
        plans=plan or [],
        stores=session.find_store,
        now=datetime.now(UTC),
        version=version("moetune"),
    )
    plans = plural(len(found.plans), "plan")
    machine = f"profile {found.profiles[0]} and " if found.profiles else ""
    session.screen.said(
        {"schema": "moetune.report/1", **encode(found), "file": str(found.file)},
        f"{plural(found.num_figures, 'figure')} of {machine}{plans} are in {output}. "
        "Open it in a browser; it needs no other file and no network.",
        as_json=json,
    )
