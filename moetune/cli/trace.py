"""`moetune trace`: a plan's timelines as a file for Perfetto."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from moetune import config
from moetune.cli.commands import AT_LEAST_1, command, option
from moetune.cli.options import MODEL, OVERSUBSCRIBE, PLAN, PROFILE
from moetune.cli.session import Session
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import ProfileError
from moetune.domain.units import format_share

if TYPE_CHECKING:
    from moetune.app.planner import Planner
    from moetune.app.trace import Overlap, Trace


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
    """Return the prediction; without a profile a layer's step can be recorded all the same."""
    try:
        return planner.trace(plan, model=model)
    except ProfileError as error:
        if plan.kind == "training":
            raise
        hint = f"{error.hint}\n  or record a real step:  --nproc RANKS"
        raise ProfileError(error.what, hint) from None
