"""`moetune models`: the named models of the papers, and Hugging Face models."""

from typing import Annotated

import typer

from moetune.cli.completers import model_names
from moetune.cli.session import All, Json, example, session_of
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.model import MODELS, WHOLE_MODELS
from moetune.domain.spelling import parsed
from moetune.domain.units import parse_count

app = typer.Typer(help="Models by name, and from their configurations.", rich_markup_mode=None)

_DEFAULT_RANKS = 64
_DEFAULT_LENGTH = 4096


@app.command("list", epilog=example("moetune models list"))
def list_models(context: typer.Context, *, json: Json = False) -> None:
    """List the named models: of the papers, and of Hugging Face."""
    from moetune.app.views.models import models_section, registry_section
    from moetune.huggingface.registry import registered_models

    screen = session_of(context).screen
    registered = registered_models()
    document = {
        "schema": "moetune.models/1",
        "models": list(MODELS.values()),
        "whole": list(WHOLE_MODELS.values()),
        "huggingface": registered,
    }
    screen.answer((models_section(), registry_section(registered)), document, as_json=json)
    if not json:
        screen.note("Show one:      moetune models show qwen3-30b-a3b")
        screen.note("Plan for one:  moetune plan --model gpt-s --profile rtx2080ti-x64")


@app.command("show", epilog=example("moetune models show qwen3-30b-a3b --seq 4096"))
def show_model(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="PATH|NAME",
            autocompletion=model_names,
            help="A name, or a Hugging Face config.json or its folder.",
        ),
    ],
    *,
    seq: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens of a sequence, such as 4k, for FLOPs.")
    ] = str(_DEFAULT_LENGTH),
    world_size: Annotated[
        int, typer.Option(min=1, help="Ranks that share the experts of a paper's layer.")
    ] = _DEFAULT_RANKS,
    all_: All = False,
    json: Json = False,
) -> None:
    """Show a model: its blocks, parameters, and FLOPs of a token."""
    from moetune.app.models import decoder_document, find_decoder_model
    from moetune.app.views.models import decoder_sections, model_section

    length = parsed(seq, parse_count, "seq") or 0
    if length < 1:
        raise InputError(f"--seq must be at least 1, got {seq}", "such as --seq 4k")
    found = find_decoder_model(name, world_size=world_size)
    decoder, paper = found.decoder, found.paper
    document: dict[str, object] = {"schema": "moetune.model/1"}
    if paper is not None:
        document |= {**encode(paper), "world_size": world_size}
    elif decoder is not None:
        document |= {
            "name": decoder.name,
            "title": found.title,
            "source": found.source,
            "published": found.published,
            "family": decoder.family,
            "d_model": decoder.d_model,
            "vocab_size": decoder.vocab_size,
            "is_tied": decoder.is_tied,
            "uncounted": decoder.uncounted,
        }
    document |= {"layer": found.layer, "seq": length, **decoder_document(decoder, length)}
    sections = decoder_sections(found, length=length)
    if paper is not None:
        sections = (model_section(paper, world_size=world_size),)
    session_of(context, all_rows=all_).screen.answer(sections, document, as_json=json)
