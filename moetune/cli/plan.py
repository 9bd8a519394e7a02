"""`moetune plan`: the best plan for a layer or a whole model on a profile's machine."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from moetune.cli.commands import command, option
from moetune.cli.options import OF_STORES, PROFILE, fields, texts_of
from moetune.cli.session import Session
from moetune.config import NO_STORE, environment
from moetune.domain.errors import BadStoreError, StoreUnavailableError
from moetune.domain.question import ASKS

if TYPE_CHECKING:
    from moetune.domain.any_plan import AnyPlan
    from moetune.domain.cluster import Machine

T = TypeVar("T")


@command(
    "moetune plan --model gpt-xl --profile rtx2080ti-x64 --dtype float16",
    *fields(*ASKS),
    PROFILE,
    option("--output", "Also write the plan to this file.", Path),
    option("--no-save", "Do not save the plan in the store.", bool),
)
def plan(
    session: Session,
    profile: str | None,
    output: Path | None,
    *,
    no_save: bool,
    **asked: str | bool | None,
) -> None:
    """Solve for the best plan of a layer or model.

    A layer's plan has the chunks and the memory strategy of its passes, a whole model's the layout
    of its training over the ranks. What one of them does not have is refused.
    """
    from moetune.app.files import write_text
    from moetune.app.planner import plan_question
    from moetune.app.requests import ask
    from moetune.app.sources import earlier_runs_note
    from moetune.app.staleness import stale_note
    from moetune.app.subjects import subject_of
    from moetune.app.views.plan import plan_sections
    from moetune.domain.question import read_texts

    make = partial(plan_question, ask(read_texts(texts_of(asked))), profile=profile)
    planned, is_saved = save_or_write(session, make, save=not no_save, output=output)
    made, used, screen = planned.plan, planned.machine, session.screen
    if output is not None:
        write_text(output, made.text)
    if note := stale_note(used.profile):
        screen.note(f"Note: {note}.")
    if is_saved and made.kind == "training" and made.calibration is None:
        with session.find_store() as store:
            if note := earlier_runs_note(store, used.profile):
                screen.note(f"Note: {note}.")
    screen.detail(f"profile {used.profile.name} ({used.profile.digest[:8]}, {used.source})")
    if session.as_json:
        screen.raw(made.text)
    else:
        screen.sections(plan_sections(subject_of(made, profile=used.profile)))
        screen.say()
    if output is not None:
        screen.note(f"Plan {made.id[:6]} is written to {output}.")
    _say_saved(session, made, used.profile.machine, is_saved=is_saved)


def _say_saved(session: Session, made: "AnyPlan", machine: "Machine", *, is_saved: bool) -> None:
    """Say whether the plan is saved, and which commands explain and run it."""
    short, screen = made.id[:6], session.screen
    if not is_saved:
        screen.note(f"Plan {short} is not saved in the store.")
    elif session.as_json:
        screen.note(f"Plan {short} saved.")
    else:
        screen.line(f"Plan {short} saved. Explain it: moetune explain {short}")
        screen.line(_what_runs_it(made, machine))


def save_or_write(
    session: Session, plan: Callable[..., T], *, save: bool, output: Path | None
) -> tuple[T, bool]:
    """Return a plan and whether the store has it; raise the errors of `plan`.

    A store that cannot be written is only a warning, because the plan is printed. A file that is
    no database is an error, unless the plan is written to `output`.
    """
    try:
        return plan(settings=session.settings, save=save), save
    except OF_STORES as problem:
        if not save or (output is None and isinstance(problem, BadStoreError)):
            raise
        reason = problem
    try:
        made = plan(settings=session.settings, save=False)
    except StoreUnavailableError:  # it cannot be read either
        made = plan(settings=replace(session.settings, db=NO_STORE), save=False)
    session.screen.note(f"warning: the plan is not saved in the store: {reason}")
    return made, False


def _what_runs_it(plan: "AnyPlan", machine: "Machine") -> str:
    """Return the command that exports a model's plan, or that verifies a layer's on its ranks."""
    from moetune.domain.cluster import torchrun

    if plan.kind == "training":
        return f"Write it for {plan.target}: moetune export {plan.id[:6]}"
    command, ranks = f"moetune verify {plan.id[:6]}", plan.layout.expert_ranks
    if ranks <= num_devices(environment().get("CUDA_VISIBLE_DEVICES")):
        return f"Verify it on this machine: {command}"
    per_node = min(ranks, machine.devices_per_node)
    nodes = math.ceil(ranks / per_node)
    launch = torchrun(nodes, per_node).replace(" --rdzv-endpoint", " \\\n    --rdzv-endpoint")
    return f"Verify it on its {ranks} ranks, on each node:\n  {launch} -m {command}"


def num_devices(visible: str | None, devices: Path = Path("/dev")) -> int:
    """Return the number of visible NVIDIA devices, or else of cores, without loading torch."""
    count = len(list(devices.glob("nvidia[0-9]*")))
    if visible is not None:
        count = min(count, len([device for device in visible.split(",") if device]))
    return count or len(os.sched_getaffinity(0))
