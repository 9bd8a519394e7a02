"""Arguments of a program in place of the command line's flags: reading them, and naming them.

A form sends each argument as a text.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast, get_args, get_type_hints

from moetune.domain.document import decode
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.spelling import nearest_or
from moetune.domain.units import parse_bytes, parse_count
from moetune.huggingface.pasted import PastedConfig, pasted_config
from moetune.workflows.flags import parsed
from moetune.workflows.plan_flags import PlanFlags

_UNITS = MappingProxyType(
    {
        "tokens": parse_count, "seq": parse_count, "vocab": parse_count,
        "memory_limit": parse_bytes, "memory_taken": parse_bytes,
    }
)  # fmt: skip
_HINTS: Mapping[str, Any] = MappingProxyType(get_type_hints(PlanFlags))
_SWITCHES: Mapping[str, bool] = MappingProxyType({"yes": True, "no": False})
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
        if name == "config" and value is not None:
            values[name] = _config(value)
        elif value is not None:
            values[name] = decode(_HINTS[name], _plain(name, value), name)
    return PlanFlags(**values)


def read_texts(texts: Mapping[str, str]) -> dict[str, object]:
    """Return the arguments in a form's texts, without those that are empty.

    Raises:
        InputError: a text is no number, or no truth value; the message names the argument.
    """
    return {name: _read(name, text.strip()) for name, text in texts.items() if text.strip()}


def _read(name: str, text: str) -> object:
    kinds = get_args(_HINTS.get(name)) or (_HINTS.get(name),)
    if bool in kinds:
        if text not in _SWITCHES:
            raise InputError(f"{name} must be yes or no, got {text[:40]!r}")
        return _SWITCHES[text]
    if float in kinds:
        try:
            return float(text)
        except ValueError:
            raise InputError(f"{name} must be a number, got {text[:40]!r}") from None
    if int in kinds and name not in _UNITS:
        return parsed(text, parse_count, name)
    return text


def _config(value: object) -> PastedConfig:
    if isinstance(value, PastedConfig):
        return value
    try:
        return pasted_config(json.dumps(value))
    except (TypeError, ValueError):
        raise InputError(
            f"config must be the values of a config.json, got {type(value).__name__}",
            "read the file with json.load, or give its path as the model",
        ) from None


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
