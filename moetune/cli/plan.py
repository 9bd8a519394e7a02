"""`moetune plan`: the best plan for a layer or a whole model on a profile's machine."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetune.cli.options import Texts, with_fields
from moetune.cli.session import Json, ProfileOption, Session, example, saved_or_written, session_of
from moetune.domain.question import ASKS

if TYPE_CHECKING:
    from moetune.domain.question import Question
    from moetune.workflows.plan import NewPlan

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
    from moetune.domain.question import read_texts
    from moetune.workflows.requests import ask, is_of_model

    question = ask(read_texts(asked))
    session, save = session_of(context), not no_save
    if is_of_model(question):
        short, after, save = _print_model(
            session, question, profile=profile, output=output, save=save, as_json=json
        )
    else:
        short, after, save = _print_layer(
            session, question, profile=profile, output=output, save=save, as_json=json
        )
    screen = session.screen
    if output is not None:
        screen.note(f"Plan {short} is written to {output}.")
    if not save:
        screen.note(f"Plan {short} is not saved in the store.")
    elif json:
        screen.note(f"Plan {short} saved.")
    else:
        screen.line(f"Plan {short} saved. Explain it: moetune explain {short}")
        screen.line(after)


def _print_model(
    session: Session,
    question: "Question",
    *,
    profile: str | None,
    output: Path | None,
    save: bool,
    as_json: bool,
) -> tuple[str, str, bool]:
    """Print the plan of a whole model; return its id, what comes next, and whether it is saved."""
    from moetune.workflows.files import write_text
    from moetune.workflows.requests import plan_model
    from moetune.workflows.views.training import training_sections

    make = partial(plan_model, question, profile=profile)
    made, save = saved_or_written(session, make, save=save, output=output)
    if output is not None:
        write_text(output, made.text)
    if as_json:
        session.screen.document(made.document)
    else:
        session.screen.answer(tuple(training_sections(made)))
        session.screen.say()
    short = made.id[:6]
    return short, f"Write it for {made.inputs.target}: moetune export {short}", save


def _print_layer(
    session: Session,
    question: "Question",
    *,
    profile: str | None,
    output: Path | None,
    save: bool,
    as_json: bool,
) -> tuple[str, str, bool]:
    """Print the plan of a layer; return its id, what comes next, and whether it is saved."""
    from moetune.cli.next_step import how_to_verify
    from moetune.workflows.files import plan_to_json, write_text
    from moetune.workflows.requests import plan_layer
    from moetune.workflows.staleness import stale_note

    screen = session.screen
    make = partial(plan_layer, question, profile=profile)
    planned, save = saved_or_written(session, make, save=save, output=output)
    used, made = planned.found.profile, planned.plan
    if note := stale_note(used):
        screen.note(f"Note: {note}.")
    if output is not None:
        write_text(output, plan_to_json(made))
    screen.detail(f"profile {used.name} ({used.digest[:8]}, {planned.found.source})")
    if as_json:
        typer.echo(plan_to_json(made), nl=False)
    else:
        _show(session, planned)
    return made.id[:6], how_to_verify(made, used.machine), save


def _show(session: Session, planned: "NewPlan") -> None:
    from moetune.workflows.subjects import LayerSubject
    from moetune.workflows.views.plan import plan_sections

    screen, made, used = session.screen, planned.plan, planned.found.profile
    screen.answer(plan_sections(LayerSubject(plan=made, profile=used)))
    screen.say()
