"""`moetune plan --model` with a Hugging Face model: the layout of its training."""

from pathlib import Path
from typing import TYPE_CHECKING

from moetune.cli.session import Session

if TYPE_CHECKING:
    from moetune.workflows.plan_flags import PlanFlags


def print_decoder(
    session: Session,
    flags: "PlanFlags",
    *,
    profile: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Plan a Hugging Face model's training and print the plan."""
    from moetune.workflows.files import write_text
    from moetune.workflows.plan_flags import plan_decoder
    from moetune.workflows.views.training import training_sections

    screen = session.screen
    plan = plan_decoder(flags, session.settings, profile=profile)
    if output is not None:
        write_text(output, plan.text)
    if as_json:
        screen.document(plan.document)
    else:
        screen.answer(training_sections(plan))
    if output is not None:
        screen.note(f"Plan {plan.id[:6]} is written to {output}.")
