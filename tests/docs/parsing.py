"""Read a command line as the program does, without running it."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from typer.main import get_command

from moetune.cli.app import program
from moetune.domain.question import ASKS, read_texts
from tests.cli.running import commands


def command_names() -> Mapping[str, Any]:
    """Return all commands by their full name."""
    return commands(get_command(program()))


def parse(line: str) -> None:
    """Parse `line`, what follows `moetune`: every flag exists, every value is one."""
    command: Any = get_command(program())
    words, name = shlex.split(line), "moetune"
    context = command.make_context(name, words)
    while getattr(command, "commands", None):
        words = [*getattr(context, "_protected_args", ()), *context.args]
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, words, parent=context)
    read_texts({
        field: text for field, text in context.params.items()
        if field in ASKS and isinstance(text, str)
    })  # fmt: skip


def check_mention(text: str) -> None:
    """Check a command that is named within a sentence: it and its flags exist."""
    known = command_names()
    words = [word for word in shlex.split(text.replace("…", ""))[1:] if word]
    while words and words[0].startswith("-"):
        words = words[2 if words[0] in {"--db", "--config"} else 1 :]
    names = [name for name in (" ".join(words[:2]), " ".join(words[:1])) if name in known]
    is_group = bool(words) and any(name.startswith(f"{words[0]} ") for name in known)
    assert names or is_group or not words, f"`{text}` is no command"
    if names:
        flags = {flag for option in known[names[0]].params for flag in option.opts}
        flags |= {flag for option in known[names[0]].params for flag in option.secondary_opts}
        used = {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)}
        assert used <= flags, f"`{text}`: {sorted(used - flags)}"
