"""Options that commands share: those of an existing plan, and the fields of the question."""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from moetune.cli.commands import argument, option
from moetune.cli.completion import model_names, plan_ids, profile_names
from moetune.domain.ask import Ask
from moetune.domain.errors import InputError, SchemaMismatchError, StoreUnavailableError
from moetune.domain.question import ASKS
from moetune.domain.units import parse_bytes
from moetune.report.section import plural

if TYPE_CHECKING:
    from moetune.domain.records import Removed


def plan_argument(name: str) -> inspect.Parameter:
    """Return the argument that names an existing plan."""
    words = "A plan's JSON file, or the beginning of an id in the store."
    return argument(name, words, names=plan_ids)


PLAN = plan_argument("plan")
PROFILE = option(
    "--profile",
    "Profile: a .toml file, or a name in the store or of a reference machine. "
    "Default: the setting, else the newest measured profile.",
    form="FILE|NAME",
    names=profile_names,
)
MODEL = option(
    "--model",
    "The config.json that a Hugging Face model's plan was made for, where its name is not in "
    "`moetune models list`.",
    form="FILE",
)
OVERSUBSCRIBE = option("--oversubscribe", "Start more ranks than there are cores.", bool)

OF_STORES = StoreUnavailableError, SchemaMismatchError
"""Errors of a store, after which some commands go on without it."""
_FORMS: Mapping[type, str] = MappingProxyType({int: "N", float: "SHARE", str: "NAME"})


def removed_words(removed: "Removed") -> str:
    """Return "1 plan and 0 settled sizes"."""
    return f"{plural(removed.plans, 'plan')} and {plural(removed.settled, 'settled size')}"


def pair(text: str) -> tuple[str, str]:
    """Return the name and the value of "NAME=VALUE"; raise InputError for any other text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InputError(f"{text!r} is not NAME=VALUE", "such as TP=2")
    return name, value


def words_in(text: str) -> list[str]:
    """Return the words of a comma-separated list."""
    return [word.strip() for word in text.split(",") if word.strip()]


def fields(
    *names: str, defaults: Mapping[str, str] = MappingProxyType({})
) -> tuple[inspect.Parameter, ...]:
    """Return the options of the question's fields, in help's order; see also `texts_of`."""
    return tuple(_field(ASKS[name], defaults.get(name)) for name in names)


def texts_of(values: Mapping[str, str | bool | None]) -> dict[str, str]:
    """Return the given fields as the texts that `question.read_texts` reads."""
    words = {True: "yes", False: "no"}
    return {
        name: words[value] if isinstance(value, bool) else value
        for name, value in values.items()
        if value is not None
    }


def _field(ask: Ask, usual: str | None) -> inspect.Parameter:
    words = ask.words if usual is None else f"{ask.words} Default: {usual}."
    if ask.kind is bool:
        flags = ask.flag if ask.is_switch else f"{ask.flag}/--no{ask.flag[1:]}"
        return option(flags, words, bool, title=ask.group.title, default=None)
    return option(
        ask.flag, words, form=_form(ask), title=ask.group.title,
        names=model_names if ask.name == "model" else lambda *_: map(str, ask.choices),
    )  # fmt: skip


def _form(ask: Ask) -> str:
    if ask.form:
        return ask.form
    if ask.choices:
        return f"[{'|'.join(map(str, ask.choices))}]"
    return "SIZE" if ask.parse is parse_bytes else _FORMS[ask.kind]
