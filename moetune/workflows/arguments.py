"""Arguments of a program in place of the command line's flags: reading them, and naming them."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast, get_type_hints

from moetune.domain.document import decode
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.spelling import nearest_or
from moetune.domain.units import parse_bytes, parse_count
from moetune.workflows.flags import parsed
from moetune.workflows.plan_flags import PlanFlags

_UNITS = MappingProxyType(
    {
        "tokens": parse_count, "seq": parse_count, "vocab": parse_count,
        "memory_limit": parse_bytes, "memory_taken": parse_bytes,
    }
)  # fmt: skip
_HINTS: Mapping[str, Any] = MappingProxyType(get_type_hints(PlanFlags))
_OTHERS = frozenset({"profile", "db", "to"})
_COMMAND_OR_FLAG = re.compile(r"(`[^`]*`|\b(?:moetune|torchrun) \S.*)|--([a-z][a-z-]*)( (?=\d))?")


def read_flags(arguments: Mapping[str, object]) -> PlanFlags:
    """Return the flags in a program's arguments; None stands for one that was not given.

    Raises:
        InputError: an argument is unknown, or its value is wrong; the text names it.
    """
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in _HINTS:
            hint = nearest_or(f"known: {', '.join(_HINTS)}", name, _HINTS)
            raise InputError(f"a plan has no argument {name!r}", hint)
        if value is not None:
            values[name] = decode(_HINTS[name], _plain(name, value), name)
    return PlanFlags(**values)


def _plain(name: str, value: object) -> object:
    """Return a text, a number or a truth value for what notebooks have: arrays' numbers, paths."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if name in _UNITS and isinstance(value, str):
        return parsed(value, _UNITS[name], name)
    if name in _UNITS and isinstance(value, float) and value.is_integer():
        return int(value)
    if name == "recompute" and isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, float):
        return float(value)
    is_count = hasattr(value, "__index__") and not isinstance(value, bool)
    return int(cast("Any", value)) if is_count else value


@contextmanager
def named_as_arguments() -> Iterator[None]:
    """Let errors name arguments where they name flags, but not in commands to be pasted."""
    try:
        yield
    except MoetuneError as error:
        error.what, error.hint = map(_as_arguments, (error.what, error.hint))
        error.args = error.what, error.hint
        raise


def _as_arguments(text: str) -> str:
    def name_of(match: re.Match[str]) -> str:
        name = (match[2] or "").replace("-", "_")
        if name not in _HINTS and name not in _OTHERS:
            return match[0]
        return f"{name}=" if match[3] else name

    return _COMMAND_OR_FLAG.sub(name_of, text)
