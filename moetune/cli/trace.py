"""`moetune trace`: a plan's timelines as a file for Perfetto."""

from collections.abc import Mapping
from json import dumps as dump
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.session import (
    Json,
    Oversubscribe,
    PlanArgument,
    ProfileOption,
    TrainedModelOption,
    example,
    refuse_model,
    session_of,
)
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.units import format_share

if TYPE_CHECKING:
    from moetune.config import Launch
    from moetune.domain.training_document import TrainingDocument
    from moetune.workflows.planner import Planner
    from moetune.workflows.trace import Overlap, Trace

EPILOG = example("moetune trace 3f9c21 --nproc 2 --output step.json")


def trace(
    context: typer.Context,
    plan: PlanArgument,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Also record a real step on this number of ranks."),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="File of the Chrome trace.")] = Path(
        "trace.json"
    ),
    model: TrainedModelOption = None,
    profile: ProfileOption = None,
    *,
    oversubscribe: Oversubscribe = False,
    json: Json = False,
) -> None:
    """Write a plan's timelines for Perfetto.

    Of a layer its streams, predicted and with --nproc also recorded; of a whole model the passes of
    every pipeline rank, and of a Hugging Face model one block besides.
    """
    from moetune import config
    from moetune.domain.training_document import TrainingDocument
    from moetune.workflows.files import find_plan, write_text
    from moetune.workflows.open_planner import local_planner

    session = session_of(context)
    environ = config.environment()
    launch = config.launch(environ)
    is_recorded = nproc is not None or launch is not None
    wanted = find_plan(plan, stores=session.find_store)
    if not isinstance(wanted, TrainingDocument):
        refuse_model(model)
    found: Trace | None
    with local_planner(session.settings, profile=profile) as planner:
        if isinstance(wanted, TrainingDocument):
            found = _of_training(planner, wanted, model, is_recorded=is_recorded)
        elif is_recorded:
            found = _recorded(
                planner, plan, num_ranks=nproc, launch=launch, environ=environ,
                oversubscribe=oversubscribe,
            )  # fmt: skip
        else:
            found = _predicted(planner, plan)
    if found is None:
        return
    write_text(output, dump(found.document))
    if json:
        session.screen.document(found.summary(str(output)))
        return
    screen = session.screen
    for name, overlap in (("Predicted", found.predicted), ("Measured", found.measured)):
        if overlap is not None:
            screen.say(f"{name}: {_words(overlap)}")
    for note in found.notes:
        screen.say(note)
    screen.line(f"Written to {output}. Open it in ui.perfetto.dev or chrome://tracing.")


def _predicted(planner: "Planner", plan: str) -> "Trace":
    try:
        return planner.trace(plan)
    except ProfileError as error:
        raise ProfileError(
            error.what, "name its profile with --profile, or record a real step with --nproc"
        ) from None


def _of_training(
    planner: "Planner", plan: "TrainingDocument", model: str | None, *, is_recorded: bool
) -> "Trace":
    if is_recorded:
        raise InputError(
            f"plan {plan.id[:6]} is a training plan, whose steps only its target runs",
            "omit --nproc: the trace has what the plan predicts",
        )
    return planner.trace_training(plan, model=model)


def _recorded(
    planner: "Planner",
    plan: str,
    *,
    num_ranks: int | None,
    launch: "Launch | None",
    environ: Mapping[str, str],
    oversubscribe: bool,
) -> "Trace | None":
    from moetune.workflows.trace import recorded_trace

    made = planner.plan(plan)
    return recorded_trace(
        made, profile=planner.profile_if_known(made), num_ranks=num_ranks, launch=launch,
        environ=environ, oversubscribe=oversubscribe,
    )  # fmt: skip


def _words(overlap: "Overlap") -> str:
    forward = format_share(overlap.forward, digits=0)
    backward = format_share(overlap.backward, digits=0)
    return f"{forward} of the communication runs behind computation forward, {backward} backward."
