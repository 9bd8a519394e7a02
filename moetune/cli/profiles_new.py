"""`moetune profiles new`: write the profile file of a machine that is described, not measured."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from moetune.app.describe import DESCRIBED, check_new, describe, description_of
from moetune.cli.options import Texts, with_fields
from moetune.cli.session import Json, session_of
from moetune.domain.model import find_model


@with_fields(*DESCRIBED, table=DESCRIBED)
def new(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The file to write.")],
    asked: Texts,
    *,
    name: Annotated[str | None, typer.Option(help="Of the profile. Default: the file's.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file.")] = False,
    json: Json = False,
) -> None:
    """Describe a machine: write a commented profile file from its GPUs, nodes and network cards.

    A reference machine stands in for what is not described, and the file names what.
    """
    from moetune.app.files import write_text

    session = session_of(context)
    check_new(file, force=force)
    described = describe(description_of(name or file.stem, asked))
    write_text(file, described.text)
    name, stand_ins = described.profile.name, described.stand_ins
    document = {"schema": "moetune.profiles.new/1", "name": name, "file": str(file)}
    session.screen.said(
        {**document, "base": described.base, "stand_ins": stand_ins},
        f"{file} is written: profile {name}, not measured",
        f"{described.base} stands in for:",
        *(f"  {part}" for part in stand_ins),
        as_json=json,
    )
    if json:
        return
    model = _model_for(described.profile.machine.num_devices)
    command = shlex.join(["moetune", "plan", "--model", model, "--profile", str(file)])
    session.screen.note(f"Plan with it:  {command}")


def _model_for(num_devices: int) -> str:
    """Return a named layer whose experts divide by the ranks."""
    experts = find_model("gpt-s").layer(num_devices).num_experts
    return "gpt-s" if experts % num_devices == 0 else "tm-1"
