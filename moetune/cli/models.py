"""`moetune models`: the named models, from the papers."""

from typing import Annotated

import typer

from moetune.cli.session import Json, example, session_of
from moetune.domain.document import encode
from moetune.domain.model import MODELS, find_model

app = typer.Typer(help="The named models to plan for.", rich_markup_mode=None)

_DEFAULT_RANKS = 64


@app.command("list", epilog=example("moetune models list"))
def list_models(context: typer.Context, *, json: Json = False) -> None:
    """List the named models."""
    from moetune.workflows.views.models import models_section

    screen = session_of(context).screen
    document = {"schema": "moetune.models/1", "models": list(MODELS.values())}
    screen.answer((models_section(),), document, as_json=json)
    if not json:
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
    """Show a model and its layer on --world-size ranks."""
    from moetune.workflows.views.models import model_section

    model = find_model(name)
    transformer = model.transformer
    document = {
        "schema": "moetune.model/1",
        **encode(model),
        "world_size": world_size,
        "layer": model.layer(world_size),
        "num_parameters": None if transformer is None else transformer.num_parameters,
    }
    found = model_section(model, world_size=world_size)
    session_of(context).screen.answer((found,), document, as_json=json)
