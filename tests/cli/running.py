"""Run the command line in this process, as the program does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

from tests.documents import read_document


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout, of the form that its schema says."""
        found = read_document(self.out)
        assert isinstance(found, dict)
        return found


XL = ("--model", "gpt-xl", "--profile", "rtx2080ti-x64", "--dtype", "float16")
OLMOE = ("--model", "olmoe", "--profile", "h100-x8", "--global-batch", "64", "--seq", "4096")
"""Flags of the plans that most tests ask for: of a layer, and of a model's training."""

Cli = Callable[..., Result]
Planned = Callable[..., dict[str, Any]]
"""Takes a file and the flags of `moetune plan`: writes the plan, and returns its document."""


def commands(group: click.Group, before: str = "") -> Mapping[str, click.Command]:
    """Return the commands of a group and of the groups in it, by their words."""
    context = click.Context(group)
    found: dict[str, click.Command] = {}
    for word in group.list_commands(context):
        name, command = f"{before} {word}".strip(), group.get_command(context, word)
        assert command is not None
        found |= commands(command, name) if isinstance(command, click.Group) else {name: command}
    return found
