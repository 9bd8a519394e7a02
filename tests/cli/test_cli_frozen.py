"""Names that other programs rely on: commands, options, exit codes.

`frozen.json` holds them. Whoever adds a name adds it there; one that is gone or renamed breaks
somebody's script.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

import moetune
from moetune.cli.app import INTERRUPTED, program
from moetune.domain.errors import MoetuneError
from tests.cli.running import commands

FROZEN: dict[str, Any] = json.loads(
    Path(__file__).with_name("frozen.json").read_text(encoding="utf-8")
)


def options(command: Any) -> list[str]:
    """Return flags in order of the alphabet, behind the arguments in theirs."""
    arguments = [f"<{arg.name}>" for arg in command.params if arg.param_type_name == "argument"]
    flags = [
        flag
        for param in command.params
        if param.param_type_name == "option"
        for flag in (*param.opts, *param.secondary_opts)
    ]
    return [*arguments, *sorted(flags)]


def error_classes(kind: type[MoetuneError] = MoetuneError) -> Iterator[type[MoetuneError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from error_classes(child)


def test_commands_and_their_options() -> None:
    program_of_all = get_command(program())
    whole = {"moetune": program_of_all, **commands(program_of_all)}
    assert {name: options(command) for name, command in whole.items()} == FROZEN["commands"]


def test_exit_codes() -> None:
    classes = [kind for kind in error_classes() if kind.__module__ == MoetuneError.__module__]
    public = {kind.__name__: kind.exit_code for kind in classes}
    assert set(public) <= set(moetune.__all__)
    assert public | {"interrupted": INTERRUPTED} == FROZEN["exit_codes"]
