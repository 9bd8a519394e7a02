"""Options of commands that are fields of the question: made from its table."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import typer

from moetune.cli.completers import gpu_names, model_names
from moetune.domain.ask import Ask
from moetune.domain.question import ASKS
from moetune.domain.units import parse_bytes

T = TypeVar("T")
Texts = Mapping[str, str]
"""Texts of the fields that were given, by name: `domain.question.read_texts` reads them."""
_FORMS: Mapping[type, str] = MappingProxyType({int: "N", float: "SHARE", str: "NAME"})
_NAMES = MappingProxyType({"model": model_names, "gpu": gpu_names})
_TEXTS = MappingProxyType({True: "yes", False: "no"})


def with_fields(
    *names: str,
    table: Mapping[str, Ask] = ASKS,
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that gives a command the options of fields, as texts in `asked`.

    Args:
        names: of fields, in the order of help.
        table: that has them.
        defaults: that help shows; the function fills them in.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @wraps(function)
        def command(**values: Any) -> T:  # noqa: ANN401 - as typer parses them
            given = ((name, values.pop(name)) for name in names)
            asked = {name: _TEXTS.get(value, value) for name, value in given if value is not None}
            return function(asked=asked, **values)

        parameters = inspect.signature(function).parameters
        own = [
            one.replace(kind=one.KEYWORD_ONLY)
            for one in parameters.values() if one.name != "asked"
        ]  # fmt: skip
        first = next((at for at, one in enumerate(own) if one.default is not one.empty), len(own))
        made = [_parameter(table[name], defaults.get(name)) for name in names]
        signature = inspect.Signature([*own[:first], *made, *own[first:]])
        command.__signature__ = signature  # type: ignore[attr-defined] # typer reads it
        return command

    return decorate


def _parameter(ask: Ask, usual: str | None) -> inspect.Parameter:
    kind: Any = bool | None if ask.kind is bool else str | None
    words = ask.words if usual is None else f"{ask.words} Default: {usual}."
    flags = (
        [ask.flag] if ask.kind is not bool or ask.is_switch else [ask.flag + "/--no" + ask.flag[1:]]
    )
    option = typer.Option(
        *flags, metavar=None if ask.kind is bool else _form(ask), help=words,
        rich_help_panel=ask.group.title, autocompletion=_completer(ask),
    )  # fmt: skip
    return inspect.Parameter(
        ask.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _form(ask: Ask) -> str:
    if ask.form:
        return ask.form
    if ask.choices:
        return f"[{'|'.join(map(str, ask.choices))}]"
    return "SIZE" if ask.parse is parse_bytes else _FORMS[ask.kind]


def _completer(ask: Ask) -> Callable[[str], list[str]] | None:
    if ask.name in _NAMES:
        return _NAMES[ask.name]
    if not ask.choices:
        return None

    def complete(incomplete: str) -> list[str]:
        return [text for text in map(str, ask.choices) if text.startswith(incomplete)]

    return complete
