"""`moetune models` and `moetune memory`: named models, Hugging Face models, and what fits where."""

from moetune.cli.commands import ALL, AT_LEAST_1, argument, command, group, option
from moetune.cli.completion import model_names
from moetune.cli.options import fields, texts_of
from moetune.cli.session import Session
from moetune.domain.cluster import process_bytes
from moetune.domain.document import encode
from moetune.domain.errors import InfeasiblePlanError, InputError
from moetune.domain.model import MODELS, WHOLE_MODELS
from moetune.domain.question import MEMORY_DEFAULTS, MEMORY_FIELDS
from moetune.domain.units import parse_count


@command("moetune models list")
def list_(session: Session) -> None:
    """List the named models: of the papers, and of Hugging Face."""
    from moetune.app.views.models import models_section, registry_section
    from moetune.huggingface.registry import registered_models

    registered = registered_models()
    document = {
        "schema": "moetune.models/1",
        "models": list(MODELS.values()),
        "whole": list(WHOLE_MODELS.values()),
        "huggingface": registered,
    }
    screen = session.screen
    screen.answer((models_section(), registry_section(registered)), document)
    screen.hint("Show a model:  moetune models show qwen3-30b-a3b")
    screen.hint("Plan for it:   moetune plan --model gpt-s --profile rtx2080ti-x64")


@command(
    "moetune models show qwen3-30b-a3b --seq 4096",
    argument(
        "name",
        "A name, or a Hugging Face config.json or its folder.",
        form="PATH|NAME",
        names=model_names,
    ),
    option("--seq", "Tokens of a sequence, such as 4k, for FLOPs.", parse_count, default="4096"),
    option(
        "--world-size", "Ranks that share the experts of a paper's layer.", AT_LEAST_1, default=64
    ),
    ALL,
)
def show(session: Session, name: str, seq: int, world_size: int) -> None:
    """Show a model: its blocks, parameters, and FLOPs of a token."""
    from moetune.app.views.models import decoder_document, decoder_sections, model_section
    from moetune.huggingface.registry import find_decoder_model

    if seq < 1:
        raise InputError(f"--seq must be at least 1, got {seq}", "such as --seq 4k")
    model = find_decoder_model(name, world_size=world_size)
    decoder, paper = model.decoder, model.paper
    document: dict[str, object] = {"schema": "moetune.model/1"}
    if paper is not None:
        document |= {**encode(paper), "world_size": world_size}
    elif decoder is not None:
        of_decoder = ("family", "d_model", "vocab_size", "is_tied", "uncounted")
        document |= {
            "name": decoder.name,
            **{name: getattr(model, name) for name in ("title", "source", "published")},
            **{name: getattr(decoder, name) for name in of_decoder},
        }
    document |= {"layer": model.layer, "seq": seq, **decoder_document(decoder, seq)}
    sections = decoder_sections(model, length=seq)
    if paper is not None:
        sections = (model_section(paper, world_size=world_size),)
    session.screen.answer(sections, document)


models = group("Models by name, and from their configurations.", list_, show)


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
    from moetune.app.requests import memory_question
    from moetune.app.views.memory import memory_document, memory_sections
    from moetune.domain.question import read_texts
    from moetune.domain.target_rules import model_rules
    from moetune.solve.model.fits import MOST_LAYOUTS, fit_memory

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
    broken = next(model_rules(answer.job.decoder, question.target), None)
    if broken is not None:
        screen.note(f"{broken.what}: its memory is that of such a runtime")
    else:
        job = answer.job
        asked = {"world_size": job.world_size, "global_batch": job.global_batch, "seq": job.length}
        flags = {"target": question.target.name} | texts | asked
        if process_bytes(device_memory) != process_bytes("80GB"):  # the memory in h100-x8
            flags["memory_limit"] = f"{answer.question.limit_bytes / 2**30:.1f}GiB"
        named = (f"--{name.replace('_', '-')} {value}" for name, value in flags.items())
        screen.hint(f"Plan it:  moetune plan --model {model} --profile h100-x8 {' '.join(named)}")
    return 0
