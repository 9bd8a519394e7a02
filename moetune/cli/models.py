"""`moetune models`: the papers' layers and whole models."""

from typing import Annotated

import typer

from moetune.cli.session import Json, example, session_of
from moetune.domain.document import encode
from moetune.domain.model import MODELS, Model, find_model

app = typer.Typer(help="The named models that a plan can be made for.", rich_markup_mode=None)

_DEFAULT_RANKS = 64


@app.command("list", epilog=example("moetune models list"))
def list_models(context: typer.Context, *, json: Json = False) -> None:
    """List the named models."""
    screen = session_of(context).screen
    if json:
        screen.document({"schema": "moetune.models/1", "models": list(MODELS.values())})
        return
    rows = [
        (
            model.name, model.title, str(model.d_model), str(model.d_hidden),
            _experts(model), str(model.top_k), f"{model.tokens_per_rank:,}", _size(model),
        )
        for model in MODELS.values()
    ]  # fmt: skip
    header = ("name", "layer", "d_model", "d_hidden", "experts", "top_k", "tokens", "whole")
    screen.table(header, rows, right=(2, 3, 5, 6, 7), indent=0)
    screen.note("Plan for one:  moetune plan --model gpt-s --profile rtx2080ti-x64")


@app.command("show", epilog=example("moetune models show tm-1 --world-size 16"))
def show_model(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the model.")],
    *,
    world_size: Annotated[
        int, typer.Option(min=1, help="Ranks that share the experts.")
    ] = _DEFAULT_RANKS,
    json: Json = False,
) -> None:
    """Show one model and its layer on so many ranks."""
    screen = session_of(context).screen
    model = find_model(name)
    layer = model.layer(world_size)
    if json:
        document = {"schema": "moetune.model/1", **encode(model)}
        whole = model.transformer
        count = None if whole is None else whole.num_parameters
        screen.document(
            {**document, "world_size": world_size, "layer": layer, "num_parameters": count}
        )
        return
    screen.say(f"{model.title} ({model.source})", style="bold")
    rows = [(key, str(value)) for key, value in encode(layer).items()]
    screen.table(
        ("layer", f"on {world_size} ranks"), [*rows, ("tokens", f"{model.tokens_per_rank:,}")]
    )
    if model.transformer is not None:
        whole = encode(model.transformer)
        del whole["moe"]
        sizes = [(key, f"{value:,}") for key, value in whole.items()]
        screen.say()
        screen.table(("whole model", ""), [*sizes, ("parameters", _size(model))])


def _size(model: Model) -> str:
    """Return the parameters of a whole model: "6.8 B"."""
    return "" if model.transformer is None else f"{model.transformer.num_parameters / 1e9:.1f} B"


def _experts(model: Model) -> str:
    return str(model.num_experts or f"{model.experts_per_rank} a rank")
