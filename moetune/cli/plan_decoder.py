"""`moetune plan --model` with a Hugging Face model: the layout of its training."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.cli.session import Session, saved_or_written

if TYPE_CHECKING:
    from moetune.workflows.plan_flags import PlanFlags


def print_decoder(
    session: Session,
    flags: "PlanFlags",
    *,
    profile: str | None,
    output: Path | None,
    save: bool,
    as_json: bool,
) -> None:
    """Plan a Hugging Face model's training, print the plan and save it."""
    from moetune.workflows.files import write_text
    from moetune.workflows.plan_flags import plan_decoder
    from moetune.workflows.views.training import training_sections

    screen = session.screen
    make = partial(plan_decoder, flags, profile=profile)
    plan, save = saved_or_written(session, make, save=save, output=output)
    if output is not None:
        write_text(output, plan.text)
    if as_json:
        screen.document(plan.document)
    else:
        screen.answer(tuple(training_sections(plan)))
        screen.say()
    short, target = plan.id[:6], plan.inputs.target
    if output is not None:
        screen.note(f"Plan {short} is written to {output}.")
    if not save:
        screen.note(f"Plan {short} is not saved in the store.")
    elif as_json:
        screen.note(f"Plan {short} saved.")
    else:
        screen.line(f"Plan {short} saved. Explain it: moetune explain {short}")
        screen.line(f"Write it for {target}: moetune export {short} --to {target}")
