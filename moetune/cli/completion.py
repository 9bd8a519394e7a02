"""`moetune completion`: the script with which a shell completes commands, flags and names."""

from typing import Annotated, Literal

import typer

from moetune.cli.session import Json, example, session_of

EPILOG = example('eval "$(moetune completion bash)"')
Shell = Literal["bash", "zsh", "fish"]
VARIABLE = "_MOETUNE_COMPLETE"


def completion(
    context: typer.Context,
    shell: Annotated[Shell, typer.Argument(help="The shell that reads it.")],
    *,
    json: Json = False,
) -> None:
    """Print a shell's completion script.

    bash: eval "$(moetune completion bash)" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc, behind
    compinit; fish: moetune completion fish > ~/.config/fish/completions/moetune.fish.
    """
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="moetune", complete_var=VARIABLE, shell=shell)
    screen = session_of(context).screen
    if json:
        screen.document({"schema": "moetune.completion/1", "shell": shell, "script": script})
    else:
        screen.line(script)
