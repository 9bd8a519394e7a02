"""Names that other programs rely on: commands, options, exit codes, keys of documents.

`frozen.json` holds them. Whoever adds a name adds it there; one that is gone or renamed breaks
somebody's script.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import moetune
from moetune.cli.app import INTERRUPTED, program
from moetune.domain.errors import MoetuneError
from tests.cli.running import Cli
from tests.report.lab import fill

FROZEN: dict[str, Any] = json.loads(
    Path(__file__).with_name("frozen.json").read_text(encoding="utf-8")
)
OPEN_MAPPINGS = ("constraints", "hardware", "software")
"""Keys whose values have keys of their users' choice."""


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for key, one in getattr(command, "commands", {}).items():
        path = f"{name} {key}".strip()
        yield from leaves(one, path) if hasattr(one, "commands") else [(path, one)]


def options(command: Any) -> list[str]:
    """Return flags in order of the alphabet, behind the arguments in theirs."""
    arguments = [f"<{one.name}>" for one in command.params if one.param_type_name == "argument"]
    flags = [
        flag
        for one in command.params
        if one.param_type_name == "option"
        for flag in (*one.opts, *one.secondary_opts)
    ]
    return [*arguments, *sorted(flags)]


def keys(value: object, path: str = "") -> Iterator[str]:
    """Yield the path of every key in a document; `[]` stands for the items of a list."""
    if isinstance(value, list):
        for one in value:
            yield from keys(one, f"{path}[]")
    if isinstance(value, dict):
        for key, one in value.items():
            yield f"{path}.{key}"
            if key not in OPEN_MAPPINGS:
                yield from keys(one, f"{path}.{key}")


def error_classes(kind: type[MoetuneError] = MoetuneError) -> Iterator[type[MoetuneError]]:
    yield kind
    for one in kind.__subclasses__():
        yield from error_classes(one)


def test_commands_and_their_options() -> None:
    whole = get_command(program())
    found = {"moetune": options(whole)} | {name: options(one) for name, one in leaves(whole)}
    assert found == FROZEN["commands"]


@pytest.mark.parametrize("name", sorted(FROZEN["commands"]))
def test_help_shows_every_option(cli: Cli, name: str) -> None:
    result = cli(*name.split()[name == "moetune" :], "--help")
    words = set(result.out.replace(",", " ").replace("/", " ").split())
    wanted = {one for one in FROZEN["commands"][name] if one.startswith("-")}
    assert wanted <= words | {"--help", "-h"}


def test_exit_codes() -> None:
    classes = [one for one in error_classes() if one.__module__ == MoetuneError.__module__]
    public = {one.__name__: one.exit_code for one in classes}
    assert set(public) <= set(moetune.__all__)
    assert public | {"interrupted": INTERRUPTED} == FROZEN["exit_codes"]


PLANS = (
    ("--model", "gpt-s", "--profile", "rtx2080ti-x64"),
    ("--model", "gpt-s", "--profile", "rtx2080ti-x64", "--memory-limit", "600MiB"),
)


def test_keys_of_plans_and_explanations(cli: Cli) -> None:
    plans: set[str] = set()
    explanations: set[str] = set()
    for arguments in PLANS:
        plan = cli("plan", *arguments, "--json").document
        plans.update(keys(plan))
        explained = cli("explain", plan["id"], "--profile", arguments[3], "--json").document
        assert set(keys(explained.pop("plan"))) <= set(keys(plan))
        explanations.update(keys(explained))
    assert sorted(plans) == FROZEN["plan"]
    assert sorted(explanations) == FROZEN["explanation"]


def test_keys_of_training_plans(cli: Cli) -> None:
    plan = cli(
        "plan", "--model", "olmoe", "--profile", "h100-x8", "--global-batch", "64", "--seq", "4096",
        "--target", "megatron", "--json",
    ).document  # fmt: skip
    found = {key for key in keys(plan) if ".predicted.parts." not in key}
    assert sorted(found) == FROZEN["training_plan"]


def test_keys_of_profiles(cli: Cli, database: Path) -> None:
    database.parent.mkdir(parents=True)
    fill(database)
    found: set[str] = set()
    for name in ("lab", "a100-x4", "rtx2080ti-x64"):
        found.update(keys(cli("profiles", "show", name, "--json").document))
    assert sorted(found) == FROZEN["profile"]


def test_keys_of_models(cli: Cli) -> None:
    found: set[str] = set()
    for name in ("qwen3-30b-a3b", "ppmoe-6.7b", "gpt-s"):
        document = cli("models", "show", name, "--json").document
        del document["sections"]
        for kind in document["kinds"] or ():
            for part in kind["parts"]:
                del part["sizes"], part["widths"]  # each kind of part has its own
        found.update(keys(document))
    assert sorted(found) == FROZEN["model"]
