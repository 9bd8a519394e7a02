"""Every command has help with an example and `--json`."""

import json
import re
import shlex
from typing import Any

import pytest
from typer.main import get_command

from moetune.cli.app import COMMANDS as SUMMARIES
from moetune.cli.app import program
from moetune.cli.commands import summary_of
from moetune.domain.ask import GROUPS
from moetune.domain.question import ASKS
from tests.cli.running import Cli, commands

COMMANDS = commands(get_command(program()))


def test_summaries_are_those_of_the_commands_and_are_not_cut(cli: Cli) -> None:
    named = {}
    for name in SUMMARIES:
        whole: Any = get_command(program({name}))
        named[name] = whole.commands[name]
    listed = " ".join(cli("--help").out.partition("Commands:")[2].split())
    for name, summary in SUMMARIES.items():
        assert summary_of(str(getattr(named[name], "help", ""))) == summary
        assert f"{name} {summary}" in listed
    for name in ("plans", "profiles"):
        listed = " ".join(cli(name, "--help").out.partition("Commands:")[2].split())
        for key, command in COMMANDS.items():
            if key.startswith(f"{name} "):
                assert f"{key.split()[1]} {summary_of(str(command.help))}" in listed


def test_help_of_plan_has_fields_on_two_screens(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("plan", "--help").out.splitlines()
    titles = [line[:-1] for line in lines if re.fullmatch(r"[A-Z].*:", line)]
    assert titles == [*(group.title for group in GROUPS), "Options"]
    assert {*ASKS} <= {param.name for param in COMMANDS["plan"].params}
    assert len(lines) <= 100
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_says_what_a_command_does_with_options_and_an_example(cli: Cli, name: str) -> None:
    result = cli(*name.split(), "--help")
    assert (result.code, result.err) == (0, "")
    usage, _, rest = result.out.partition("\n")
    assert usage.startswith(f"Usage: moetune {name}")
    assert re.search(r"\n  [A-Z].+", rest)
    assert f"\n  Example:\n    moetune {name}" in result.out
    assert re.search(r"--json\s+Print one JSON document", result.out)
    words = set(result.out.replace(",", " ").replace("/", " ").split())
    options = [param for param in COMMANDS[name].params if param.param_type_name == "option"]
    assert {flag for option in options for flag in (*option.opts, *option.secondary_opts)} <= words


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_name_only_options_that_exist(name: str) -> None:
    command = COMMANDS[name]
    known = {flag for option in command.params for flag in option.opts}
    example = str(command.epilog).rsplit("\n", 1)[-1]
    used = {word for word in shlex.split(example) if word.startswith("--")}
    assert used <= known


def test_every_option_is_explained() -> None:
    for name, command in COMMANDS.items():
        for option in command.params:
            assert option.help, f"{name} {option.opts[0]}"


def test_a_usage_error_with_json_is_one_document(cli: Cli) -> None:
    document = json.loads(cli("profiles", "show", "--json").out)
    assert document["exit_code"] == 2
    assert "moetune profiles show --help" in document["hint"]
