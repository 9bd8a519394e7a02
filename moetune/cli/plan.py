"""`moetune plan`: the best plan for a layer or a whole model on a profile's machine."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.next_step import what_runs_it
from moetune.cli.options import Texts, with_fields
from moetune.cli.session import Json, ProfileOption, Session, example, saved_or_written, session_of
from moetune.domain.question import ASKS

if TYPE_CHECKING:
    from moetune.app.planner import NewPlan
    from moetune.app.profiles import FoundProfile

EPILOG = example("moetune plan --model gpt-xl --profile rtx2080ti-x64 --dtype float16")


@with_fields(*ASKS)
def plan(
    context: typer.Context,
    asked: Texts,
    *,
    profile: ProfileOption = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the plan to this file.")
    ] = None,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Do not save the plan in the store.")
    ] = False,
    json: Json = False,
) -> None:
    """Solve for the best plan of a layer or model.

    A layer's plan has the chunks and the memory strategy of its passes, a whole model's the layout
    of its training over the ranks. What one of them does not have is refused.
    """
    from moetune.app.files import write_text
    from moetune.app.planner import plan_question
    from moetune.app.requests import ask
    from moetune.domain.question import read_texts

    question, session = ask(read_texts(asked)), session_of(context)
    make = partial(plan_question, question, profile=profile)
    planned, save = saved_or_written(session, make, save=not no_save, output=output)
    made, screen = planned.plan, session.screen
    if output is not None:
        write_text(output, made.text)
    _say_profile(session, planned.found)
    if json:
        typer.echo(made.text, nl=False)
    else:
        _show(session, planned)
    short = made.id[:6]
    if output is not None:
        screen.note(f"Plan {short} is written to {output}.")
    if not save:
        screen.note(f"Plan {short} is not saved in the store.")
    elif json:
        screen.note(f"Plan {short} saved.")
    else:
        screen.line(f"Plan {short} saved. Explain it: moetune explain {short}")
        screen.line(what_runs_it(made, planned.found.profile.machine))


def _say_profile(session: Session, found: "FoundProfile") -> None:
    from moetune.app.staleness import stale_note

    if note := stale_note(found.profile):
        session.screen.note(f"Note: {note}.")
    session.screen.detail(f"profile {found.profile.name} ({found.digest[:8]}, {found.source})")


def _show(session: Session, planned: "NewPlan") -> None:
    from moetune.app.subjects import subject_of
    from moetune.app.views.plan import plan_sections

    screen, used = session.screen, planned.found.profile
    screen.answer(plan_sections(subject_of(planned.plan, profile=used)))
    screen.say()
