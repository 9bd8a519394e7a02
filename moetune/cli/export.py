"""`moetune export`, `trace` and `report`: plans as files for runtimes, Perfetto and readers."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moetune import config
from moetune.cli.commands import AT_LEAST_1, command, option
from moetune.cli.completion import plan_ids
from moetune.cli.options import MODEL, OVERSUBSCRIBE, PLAN, PROFILE
from moetune.cli.session import Session
from moetune.domain.any_plan import AnyPlan
from moetune.domain.document import encode
from moetune.domain.errors import ProfileError
from moetune.domain.spelling import about
from moetune.domain.targets import TARGETS
from moetune.domain.units import format_share
from moetune.report.section import plural

if TYPE_CHECKING:
    from moetune.app.planner import Planner
    from moetune.app.trace import Overlap, Trace


@command(
    "moetune export plan.json --output layout.sh",
    PLAN,
    option(
        "--target --to",
        f"{', '.join(TARGETS)}; or with a version: megatron@0.17. Default: the plan's.",
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
        if output.suffix not in ("", Path(export.file_name).suffix):
            screen.hint(f"Name it like {export.file_name}: `moetune check` goes by the ending.")
    if session.as_json:
        screen.document(export)
    elif output is None:
        screen.raw(export.text)
    else:
        screen.line(f"Written to {output}, for {find_target(export.target).label}.")
    for option_name in export.not_expressed:
        screen.hint(f"Not expressed: {option_name}.")
    screen.hint(launch)


@command(
    "moetune trace 3f9c21 --nproc 2 --output step.json",
    PLAN,
    option("--nproc", "Also record a real step on this number of ranks.", AT_LEAST_1),
    option("--output", "File of the Chrome trace.", Path, default="trace.json"),
    MODEL,
    PROFILE,
    OVERSUBSCRIBE,
)
def trace(
    session: Session,
    plan: str,
    nproc: int | None,
    output: Path,
    model: str | None,
    profile: str | None,
    *,
    oversubscribe: bool,
) -> None:
    """Write a plan's timelines for Perfetto.

    Of a layer its streams, predicted and with --nproc also recorded; of a whole model the passes of
    every pipeline rank.
    """
    from moetune.app.files import write_text
    from moetune.app.trace import recorded_trace

    environ = config.environment()
    launch = config.launch(environ)
    wanted = session.plan(plan)
    with session.planner(profile) as planner:
        if nproc is None and launch is None:
            made: Trace | None = _predict(planner, wanted, model)
        else:
            made = recorded_trace(
                planner.explain(wanted, model=model),
                num_ranks=nproc, launch=launch, environ=environ, oversubscribe=oversubscribe,
            )  # fmt: skip
    if made is None:
        return
    write_text(output, json.dumps(made.document))
    overlaps = (("Predicted", made.predicted), ("Measured", made.measured))
    session.screen.result(
        made.summary(str(output)),
        *(f"{name}: {_words(overlap)}" for name, overlap in overlaps if overlap is not None),
        *made.notes,
        f"Written to {output}. Open it in ui.perfetto.dev or chrome://tracing.",
    )


def _words(overlap: "Overlap") -> str:
    forward = format_share(overlap.forward, digits=0)
    backward = format_share(overlap.backward, digits=0)
    return f"{forward} of the communication runs behind computation forward, {backward} backward."


def _predict(planner: "Planner", plan: AnyPlan, model: str | None) -> "Trace":
    """Return the predicted trace; for a layer, a ProfileError also says how to record a step."""
    try:
        return planner.trace(plan, model=model)
    except ProfileError as error:
        if plan.kind == "training":
            raise
        hint = f"{error.hint}\n  or record a real step:  --nproc RANKS"
        raise ProfileError(error.what, hint) from None


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
    from moetune.app.report import write_report

    written = write_report(
        output,
        profile=profile,
        default=session.settings.profile,
        plans=plan,
        stores=session.find_store,
    )
    plans = plural(len(written.plans), "plan")
    machine = f"Profile {written.profiles[0]} and " if written.profiles else ""
    session.screen.result(
        {"schema": "moetune.report/1", **encode(written), "file": str(written.file)},
        f"{machine}{plans} in {output}. "
        "Open it in a browser; it needs no other file and no network.",
    )
