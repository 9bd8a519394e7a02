"""Errors of values name the flag that was typed with the value."""

import re
from collections.abc import Iterator, Sequence

from moetune.domain.errors import InputError, MoetuneError, NotFoundError, ProfileError

_NAMES_A_FLAG = re.compile(r"(?<![\w-])--[a-z]")
_OF_VALUES = (InputError, NotFoundError, ProfileError)


def with_flag(error: MoetuneError, arguments: Sequence[str]) -> MoetuneError:
    """Return the error with the one typed flag before it that its text is about; else as it is.

    Layers below the command line do not know how a value was given: what they quote ('fp99', or
    "got 0") is looked up in the line, else the name that their text begins with.

    Args:
        arguments: of the line.
    """
    if type(error) not in _OF_VALUES or _NAMES_A_FLAG.search(error.what):
        return error
    typed = tuple(_values(arguments))
    flags = {flag for flag, value in typed if _is_quoted(value, error.what)}
    flags = flags or {flag for flag, _ in typed if _is_named(flag, error.what)}
    if len(flags) != 1:
        return error
    named = type(error)(f"{flags.pop()}: {error.what}", error.hint)
    named.__cause__ = error
    return named


def _values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags with their values: `--flag value` and `--flag=value`."""
    for at, one in enumerate(arguments):
        flag, sign, value = one.partition("=")
        if not flag.startswith("--"):
            continue
        if sign:
            yield flag, value
        elif at + 1 < len(arguments) and not arguments[at + 1].startswith("--"):
            yield flag, arguments[at + 1]


def _is_quoted(value: str, text: str) -> bool:
    return repr(value) in text or re.search(rf"\bgot {re.escape(value)}(?!\w)", text) is not None


def _is_named(flag: str, text: str) -> bool:
    return re.match(rf"(?:a )?{flag[2:].replace('-', '_')}\b", text) is not None
