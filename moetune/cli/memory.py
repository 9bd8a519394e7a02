"""`moetune memory`: what fits where, without a profile."""

from typing import Annotated

import typer

from moetune.cli.completers import model_names
from moetune.cli.options import Texts, with_fields
from moetune.cli.session import All, Json, command_again, example, session_of
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.question import MEMORY_DEFAULTS, MEMORY_FIELDS

EPILOG = example("moetune memory qwen3-30b-a3b --device-memory 80GB --world-size 64")


@with_fields(*MEMORY_FIELDS, defaults=MEMORY_DEFAULTS)
def memory(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="PATH|NAME",
            autocompletion=model_names,
            help="A name, or a Hugging Face config.json.",
        ),
    ],
    asked: Texts,
    *,
    device_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Of one GPU: 80GB as sold, or 79.1GiB as reported.")
    ] = "80GB",
    all_: All = False,
    json: Json = False,
) -> None:
    """Say which layouts of a model's training fit, and where the memory goes.

    Without --world-size it is the fewest GPUs on which a layout fits.
    """
    from moetune.app.memory import MOST_LAYOUTS, fit_memory
    from moetune.app.requests import memory_question
    from moetune.app.views.memory import memory_document, memory_sections
    from moetune.domain.question import read_texts
    from moetune.domain.target_rules import model_rules

    session, target = session_of(context, all_rows=all_), {**MEMORY_DEFAULTS, **asked}["target"]
    question = memory_question({"model": model, **read_texts(asked)}, device_memory=device_memory)
    answer = fit_memory(question, most_layouts=None if all_ else MOST_LAYOUTS)
    session.screen.answer(memory_sections(answer), memory_document(answer), as_json=json)
    if not answer.fits:
        if question.world_size is not None and not json:
            fewest = command_again(session, without=("--world-size",))
            session.screen.note(f"How many GPUs it takes:  {fewest}")
        raise typer.Exit(InfeasiblePlanError.exit_code)
    broken = next(model_rules(question.decoder, question.target), None)
    if broken is not None:
        session.screen.note(f"{broken.what}: its memory is that of such a runtime")
    elif not json:
        session.screen.note(
            f"Plan it:  moetune plan --model {model} --profile h100-x8 "
            f"--world-size {answer.job.world_size} --global-batch {answer.job.global_batch} "
            f"--seq {answer.job.length} --target {target}"
        )
