"""Run the command line in this process, as the program does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.documents import read_document


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout, of the form that its schema says."""
        value = read_document(self.out)
        assert isinstance(value, dict)
        return value


XL = ("--model", "gpt-xl", "--profile", "rtx2080ti-x64", "--dtype", "float16")
OLMOE = ("--model", "olmoe", "--profile", "h100-x8", "--global-batch", "64", "--seq", "4096")
"""Flags of the plans that most tests ask for: of a layer, and of a model's training."""

Cli = Callable[..., Result]
Planned = Callable[..., dict[str, Any]]
"""Takes a file and the flags of `moetune plan`: writes the plan, and returns its document."""


def commands(command: Any, words: str = "") -> dict[str, Any]:
    """Return a command, or the commands of a group and of the groups in it, by their words."""
    inside = getattr(command, "commands", None)
    if inside is None:
        return {words: command}
    named: dict[str, Any] = {}
    for word, each in inside.items():
        named |= commands(each, f"{words} {word}".strip())
    return named
