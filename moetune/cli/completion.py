"""`moetune completion`: the script with which a shell completes, and the answers to it."""

import shlex
from collections.abc import Mapping
from typing import Annotated, Literal

import typer

from moetune.cli.session import Json, example, session_of

EPILOG = example("moetune completion bash")
VARIABLE = "_MOETUNE_COMPLETE"
"""Set by a shell that asks for completions."""

_LINES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")
"""Variables in which bash, and zsh and fish, pass the line so far."""


def completion(
    context: typer.Context,
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(help="The shell that you type in.")
    ],
    *,
    json: Json = False,
) -> None:
    """Print the script that completes commands and names.

    bash: add `source <(moetune completion bash)` to ~/.bashrc. zsh: add the same with zsh to
    ~/.zshrc, behind compinit. fish: write it to ~/.config/fish/completions/moetune.fish.
    """
    from typer._completion_shared import get_completion_script

    screen = session_of(context).screen
    script = get_completion_script(prog_name="moetune", complete_var=VARIABLE, shell=shell)
    if json:
        screen.document({"schema": "moetune.completion/1", "shell": shell, "script": script})
    else:
        typer.echo(script)


def prepare_answer(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Let typer answer a shell, and return the words of the line that is completed."""
    from typer._completion_classes import completion_init

    completion_init()
    line = next((environ[name] for name in _LINES if name in environ), "")
    try:
        return tuple(shlex.split(line))
    except ValueError:  # a quote is still open
        return tuple(line.split())
