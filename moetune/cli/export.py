"""`moetune export`: a training plan as what a runtime reads."""

import shlex
from pathlib import Path

from moetune.cli.commands import command, option
from moetune.cli.options import PLAN
from moetune.cli.session import Session
from moetune.domain.spelling import about
from moetune.domain.targets import TARGETS


@command(
    "moetune export plan.json --output layout.sh",
    PLAN,
    option(
        "--target --to",
        f"{', '.join(TARGETS)}; or with a version: megatron@0.17. Default: the plan's own.",
        form="TARGET",
    ),
    option("--model", "The config.json of a plan whose model has no name.", form="PATH"),
    option("--output", "Write to this file. Default: stdout.", Path),
)
def export(
    session: Session, plan: str, target: str | None, model: str | None, output: Path | None
) -> None:
    """Write a training plan as arguments, a configuration or a function of a runtime."""
    from moetune.app.export import export_plan
    from moetune.app.files import write_text
    from moetune.domain.targets import find_target

    screen = session.screen
    with about("target"):
        find_target(target or TARGETS[0])  # before the plan, which may be far away
    made = session.plan(plan).as_model()
    export = export_plan(made, to=target or made.target, model=model, stores=session.find_store)
    launch = f"Launch (file name {export.file_name}):  {export.launch}"
    if output is not None:
        write_text(output, export.text)
        if export.file_name in export.launch:
            command = export.launch.replace(export.file_name, shlex.quote(str(output)))
            launch = f"Launch:  {command}"
    if session.as_json:
        screen.document(export)
    elif output is None:
        screen.raw(export.text)
    else:
        screen.line(f"Written to {output}, for {find_target(export.target).label}.")
    for option_name in export.not_expressed:
        screen.hint(f"Not expressed: {option_name}.")
    screen.hint(launch)
