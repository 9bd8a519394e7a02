"""models, db, doctor, and the options before the command."""

import json
import sqlite3
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.running import Cli


@pytest.mark.parametrize("arguments", [
    ("models", "list"), ("models", "show", "tm-1"), ("profiles", "list"),
])  # fmt: skip
def test_json_has_the_values_of_what_is_shown(cli: Cli, arguments: tuple[str, ...]) -> None:
    shown = " ".join(cli(*arguments).out.split())
    sections = cli(*arguments, "--json").document["sections"]
    tables = [table for section in sections for table in section["tables"]]
    assert tables
    for table in tables:
        assert len(table["units"]) == len(table["header"])
        for row in table["rows"]:
            assert len(row) == len(table["header"])
            assert str(row[0]).split()[0] in shown


def test_db_upgrade_makes_a_database_and_then_finds_it_done(cli: Cli, database: Path) -> None:
    before = cli("doctor", "--json").document["store"]
    assert (before["revision"], before["num_runs"], before["num_plans"]) == (None, 0, 0)
    made = cli("db", "upgrade", "--json").document
    assert (made["from"], made["to"]) == (None, before["wanted"])
    assert made["location"] == str(database)
    again = cli("db", "upgrade", "--json").document
    assert again["from"] == again["to"] == before["wanted"]
    assert cli("doctor", "--json").document["store"]["revision"] == before["wanted"]
    assert cli("db", "check", "--json").document["problems"] == []
    assert "no problems" in cli("db", "check").out


def test_db_check_of_a_damaged_database_exits_1_and_names_it(cli: Cli, database: Path) -> None:
    plan = cli("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--json").document
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE plans SET document = '{}'")
    result = cli("db", "check")
    assert result.code == 1
    assert plan["id"][:6] in result.out


def test_doctor_prints_settings_and_origins(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("moetune.toml").write_text("max_degree = 8", encoding="utf-8")
    monkeypatch.setenv("MOETUNE_ALLOW_MODELLED", "1")
    document = cli("doctor", "--json").document
    assert document["settings"]["max_degree"] == 8
    assert document["settings"]["allow_modelled"] is True
    origins = document["origins"]
    assert origins["max_degree"] == str(Path("moetune.toml").resolve())
    assert origins["allow_modelled"] == "MOETUNE_ALLOW_MODELLED"
    assert origins["preset"] == "default"
    out = cli("doctor").out
    assert "max_degree" in out
    assert "MOETUNE_ALLOW_MODELLED" in out


def test_settings_reach_the_plan(cli: Cli) -> None:
    Path("moetune.toml").write_text(
        'max_degree = 1\nprofile = "rtx2080ti-x64"\ndtype = "float16"', encoding="utf-8"
    )
    plan = cli("plan", "--model", "gpt-xl", "--json").document
    assert plan["pipeline"]["backward_degree"] == 1
    assert plan["inputs"]["dtype"] == "float16"
    free = cli("plan", "--model", "gpt-xl", "--max-degree", "64", "--json").document
    assert free["pipeline"]["backward_degree"] > 1
    settings = Path("other.toml")
    settings.write_text('profile = "rtx2080ti-x32"', encoding="utf-8")
    other = cli("--config", "other.toml", "plan", "--model", "gpt-xl", "--json").document
    assert other["inputs"]["profile"] == "rtx2080ti-x32"


def test_a_password_is_never_shown(cli: Cli) -> None:
    url = "postgresql+psycopg://me:hunter2@127.0.0.1:1/moetune"
    for arguments in (("doctor",), ("profiles", "list"), ("db", "check")):
        result = cli("--db", url, *arguments)
        assert "hunter2" not in result.out + result.err
        assert "127.0.0.1" in result.out + result.err


def test_doctor_reports_machine_store_settings_and_versions(cli: Cli, database: Path) -> None:
    result = cli("doctor", "--json")
    assert result.code == 0
    document = result.document
    assert document["schema"] == "moetune.doctor/1"
    assert document["cluster"]["machine"]["kind"] in ("cpu", "cuda")
    assert document["cluster"]["fingerprint"]["hardware"]["cpu"]
    assert len(document["hardware_id"]) == len(document["software_id"]) == 16
    assert document["store"]["location"] == str(database)
    assert document["versions"]["moetune"] == version("moetune")
    assert document["settings"]["max_degree"] == 64
    out = cli("doctor").out
    for words in ("Hardware fingerprint", "Software fingerprint", str(database), "torch"):
        assert words in out
    assert not database.exists()


def test_doctor_reports_a_broken_store_and_still_everything_else(cli: Cli) -> None:
    Path("notes.db").write_text("no database " * 99, encoding="utf-8")
    result = cli("--db", "notes.db", "doctor", "--json")
    assert result.code == 2
    assert result.document["store"]["problem"]["exit_code"] == 2
    assert result.document["versions"]["torch"]


def test_version_and_help_need_no_command(cli: Cli) -> None:
    first, *targets = cli("--version").out.splitlines()
    assert first == f"moetune {version('moetune')}"
    assert "megatron 0.16, 0.17, 0.18, 0.19" in targets
    assert cli().code == 0
    assert cli().out == cli("--help").out


def test_quiet_leaves_the_answer_and_drops_the_notes(cli: Cli) -> None:
    arguments = ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--json")
    assert cli("-q", *arguments).err == ""
    loud = cli("-v", *arguments)
    assert "saved" in loud.err
    assert "bundled" in loud.err
    assert json.loads(loud.out) == cli(*arguments).document


def test_colour_is_forced_and_never_if_no_color(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[1" in cli("profiles", "show", "rtx2080ti-x64").out
    assert "\x1b[31" not in cli("--no-color", "models", "show", "x").err
    assert "31m" in cli("models", "show", "x").err
