"""`moetune memory`: what fits where, without a profile."""

from moetune.cli.commands import ALL, argument, command, option
from moetune.cli.completion import model_names
from moetune.cli.options import fields, texts_of
from moetune.cli.session import Session
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.question import MEMORY_DEFAULTS, MEMORY_FIELDS


@command(
    "moetune memory qwen3-30b-a3b --device-memory 80GB --world-size 64",
    argument(
        "model", "A name, or a Hugging Face config.json.", form="PATH|NAME", names=model_names
    ),
    *fields(*MEMORY_FIELDS, defaults=MEMORY_DEFAULTS),
    option(
        "--device-memory",
        "Of one GPU: 80GB as sold, or 79.1GiB as reported.",
        form="SIZE",
        default="80GB",
    ),
    ALL,
)
def memory(session: Session, model: str, device_memory: str, **sizes: str | None) -> int:
    """Say which layouts of a model's training fit, and where the memory goes.

    Without --world-size it is the fewest GPUs on which a layout fits.
    """
    from moetune.app.memory import MOST_LAYOUTS, fit_memory
    from moetune.app.requests import memory_question
    from moetune.app.views.memory import memory_document, memory_sections
    from moetune.domain.question import read_texts
    from moetune.domain.target_rules import model_rules

    texts, screen = texts_of(sizes), session.screen
    question = memory_question({"model": model, **read_texts(texts)}, device_memory=device_memory)
    answer = fit_memory(question, most_layouts=MOST_LAYOUTS if session.most_rows else None)
    screen.answer(memory_sections(answer), memory_document(answer))
    if not answer.fits:
        if question.world_size is not None:
            screen.hint(
                f"How many GPUs it takes:  {session.command_again(without=('--world-size',))}"
            )
        return InfeasiblePlanError.exit_code
    broken = next(model_rules(question.decoder, question.target), None)
    if broken is not None:
        screen.note(f"{broken.what}: its memory is that of such a runtime")
    else:
        screen.hint(
            f"Plan it:  moetune plan --model {model} --profile h100-x8 "
            f"--world-size {answer.job.world_size} --global-batch {answer.job.global_batch} "
            f"--seq {answer.job.length} --target {texts.get('target', MEMORY_DEFAULTS['target'])}"
            + "".join(f" --{name} {texts[name]}" for name in ("train", "freeze") if name in texts)
        )
    return 0
