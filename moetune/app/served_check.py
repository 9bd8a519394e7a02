"""The check of a launch that another machine sent as text: no file of this one is read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetune.app.check import check_file
from moetune.app.launch_check import Checked
from moetune.app.plan import profile_name
from moetune.app.planner import ServicePlanner
from moetune.app.requests import check_served
from moetune.domain.errors import InputError
from moetune.domain.question import BUDGET_FIELDS, read_question
from moetune.domain.spelling import AS_ARGUMENTS, spelled
from moetune.launches.reading import Asked

_KINDS = (
    (".json", r"\A\s*\{"),
    (".py", r"(?m)^(?:import|from) \w"),
    (".toml", r"(?m)^\[[\w.-]+\]\s*$"),
    (".yaml", r"(?m)\A(?:\s*(?:#.*)?\n|---\n)*[\w-]+:(?:\s|$)"),
)
"""Beginnings or lines of a text, by the ending of such files."""
_ASKED = ("model", "world_size", "target", *BUDGET_FIELDS)
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchText:
    """A launch file's text, and what the file leaves open.

    Args:
        text: of the file, which is read and never run.
        name: of the file, whose ending says its kind; "" to tell it by the text.
        profile: name of the machine's profile; None for the default one.
        model: a name of the list; None for the file's own.
        arguments: words that the script gets.
        values: of variables that it takes from its environment.
        train_tokens: a number, or a text with a unit such as "1T".
        price, utilization: as of `moetune.plan`.
    """

    text: str
    name: str = ""
    profile: str | None = None
    model: str | None = None
    world_size: int | None = None
    target: str | None = None
    arguments: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    train_tokens: object = None
    price: float | None = None
    utilization: float | None = None


def check_text(planner: ServicePlanner, sent: LaunchText) -> Checked:
    """Return the check of a launch.

    Raises:
        InputError: the text is none of a launch, a value is wrong, or it names a file.
        ProfileError: there is no such profile, or it lacks an operation.
        SolveLimitError: it takes too long.
    """
    given = {name: value for name in _ASKED if (value := getattr(sent, name)) is not None}
    with spelled(AS_ARGUMENTS):
        check_served(given)
        budget = read_question(given).budget
    if not sent.text.strip():
        raise InputError("there is no launch to check", "paste what starts the run", field="text")
    if len(sent.name) > _LONGEST_NAME:
        raise InputError(f"name is longer than {_LONGEST_NAME} characters", field="name")
    named = None if sent.profile is None else profile_name(sent.profile)
    asked = Asked(
        target=sent.target, model=sent.model, world_size=sent.world_size, extra=sent.arguments,
        values=sent.values, reads_files=False,
    )  # fmt: skip
    name = Path(Path(sent.name).name or name_of(sent.text))
    return check_file(planner, name, sent.text, asked, profile=named, budget=budget)


def name_of(text: str) -> str:
    """Return the name that a pasted launch would have: a script's where nothing else is seen."""
    if text.startswith("#!"):
        return "launch.sh"
    kinds = (ending for ending, look in _KINDS if re.search(look, text))
    return f"launch{next(kinds, '.sh')}"
