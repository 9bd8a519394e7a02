"""`moetune models`: the named models of the papers, and Hugging Face models."""

from moetune.cli.commands import ALL, AT_LEAST_1, argument, command, group, option
from moetune.cli.completion import model_names
from moetune.cli.session import Session
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.model import MODELS, WHOLE_MODELS
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
    screen.hint("Show one:      moetune models show qwen3-30b-a3b")
    screen.hint("Plan for one:  moetune plan --model gpt-s --profile rtx2080ti-x64")


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
    from moetune.app.models import decoder_document
    from moetune.app.views.models import decoder_sections, model_section
    from moetune.huggingface.registry import find_decoder_model

    if seq < 1:
        raise InputError(f"--seq must be at least 1, got {seq}", "such as --seq 4k")
    model = find_decoder_model(name, world_size=world_size)
    decoder, paper = model.decoder, model.paper
    document: dict[str, object] = {"schema": "moetune.model/1"}
    if paper is not None:
        document |= {**encode(paper), "world_size": world_size}
    elif decoder is not None:
        document |= {
            "name": decoder.name,
            "title": model.title,
            "source": model.source,
            "published": model.published,
            "family": decoder.family,
            "d_model": decoder.d_model,
            "vocab_size": decoder.vocab_size,
            "is_tied": decoder.is_tied,
            "uncounted": decoder.uncounted,
        }
    document |= {"layer": model.layer, "seq": seq, **decoder_document(decoder, seq)}
    sections = decoder_sections(model, length=seq)
    if paper is not None:
        sections = (model_section(paper, world_size=world_size),)
    session.screen.answer(sections, document)


models = group("Models by name, and from their configurations.", list_, show)
