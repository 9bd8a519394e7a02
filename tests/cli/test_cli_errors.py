"""Every exit code, and every kind of wrong input: one clear message, nothing half-written."""

import json
import sqlite3
from pathlib import Path

import pytest

from moetune.app.files import bundled_profiles
from tests.cli.running import XL, Cli

PLAN = ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64")
GPT_XL = ("plan", *XL)
_JOB = ("--profile", "h100-x8", "--world-size", "8", "--global-batch", "16", "--seq", "4096")
QWEN = ("plan", "--model", "qwen3-30b-a3b", *_JOB)
OLD_SCHEMA = Path(__file__).parents[1] / "store" / "schema_0001.sql"
TOML = bundled_profiles()["rtx2080ti-x64"].read_text(encoding="utf-8")


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (("plan",), 2, ("nothing to plan for", "--model")),
    (("plan", "--model", "gpt-xll"), 2, ("'gpt-xll' is unknown", "did you mean gpt-xl?")),
    (("plan", "--model", "gpt-s"), 5, ("none was measured", "moetune profile")),
    (("plan", "--model", "gpt-s", "--d-model", "8"), 2, ("exclude each other",)),
    (("plan", "--d-model", "8"), 2, ("lacks --d-hidden, --num-experts",)),
    ((*PLAN, "--tokens", "1k", "--batch", "2"), 2, ("exclude each other",)),
    ((*PLAN, "--batch", "2"), 2, ("--batch and --seq go together",)),
    ((*PLAN, "--world-size", "48"), 2, ("num_experts (64) does not divide", "48")),
    ((*PLAN, "--dtype", "float64"), 5, ("no GEMM measured in float64", "moetune profile")),
    ((*PLAN, "--memory-limit", "1MB"), 3, ("memory binds",)),
    ((*PLAN, "--global-batch", "8"), 2, ("--global-batch",)),
    ((*PLAN, "--schedule", "1f1b"), 2, ("--schedule",)),
    ((*GPT_XL, "--forward-degree", "5", "--backward-degree", "3"), 2,
     ("--forward-degree 5 and --backward-degree 3 exclude each other",)),
    ((*GPT_XL, "--forward-degree", "9", "--max-degree", "8"), 3, ("max_degree is 8",)),
    ((*GPT_XL, "--memory-limit", "100MiB"), 3, ("memory binds", "100 MiB")),
    ((*GPT_XL, "--memory-taken", "12GiB"), 3, ("takes 12.0 GiB of 10.1 GiB",)),
    ((*GPT_XL, "--strategy", "S1"), 5, ("S1 copies to the host",)),
    (("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x16", "--world-size", "64"), 5,
     ('no all_to_all measured for 64 ranks (profile "rtx2080ti-x16" has 16)', "moetune profile",
      "--allow-modelled")),
    ((*PLAN, "--output", "no/such/plan.json"), 2, ("no/such/plan.json cannot be written",)),
    (("plan", "--model", "gpt-s", "--profile", "lab.toml"), 2, ("lab.toml cannot be read",)),
    ((*PLAN, "--d-modle", "8"), 2, ("--d-modle", "--d-model")),
    ((*PLAN, "-q"), 2, ("write it before the command",)),
    (("plane",), 2, ("'plane'", "'plan'")),
    (("profiles", "lits"), 2, ("'lits'", "'list'", "moetune profiles --help")),
    (("explain",), 2, ("Missing argument 'PLAN'",)),
    (("explain", "abc"), 2, ("begins with 'abc'", "moetune plan")),
    (("profiles", "show", "nothing"), 5, ("'nothing' is unknown",)),
    (("profiles", "remove", "rtx2080ti-x64"), 5, ("comes with moetune",)),
    (("profiles", "import", "lab.toml"), 2, ("lab.toml cannot be read",)),
    (("profiles", "export", "rtx2080ti-x64", "--output", "/no/x"), 2, ("/no/x cannot be",)),
    (("db", "check"), 2, ("there is no moetune database",)),
    (("--config", "none.toml", "profiles", "list"), 2, ("none.toml cannot be read",)),
    (("--db", "mysql://x/y", "profiles", "list"), 2, ("'mysql'", "postgresql")),
    (("--db", "", "profiles", "list"), 2, ("db must not be empty",)),
    ((*PLAN, "--pp", "2"), 2, ("--pp is for whole models",)),
    (("plan", "--model", "mixtral-8x7b", "--profile", "h100-x8", "--moe-every", "2"), 2,
     ("--moe-every is for a model by its sizes, and mixtral-8x7b has fixed sizes",)),
    (("memory", "gpt-s"), 2, ("not a whole model",)),
    (("memory", "olmoe", "--tp", "3"), 2, ("tp",)),
    (("memory", "nothing-7b"), 2, ("nothing-7b",)),
])  # fmt: skip
def test_wrong_input_says_what_and_what_next(
    cli: Cli, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    result = cli(*arguments)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith("error: ")
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err
    assert not list(Path().iterdir())

    document = cli(*arguments, "--json").document
    assert set(document) - {"plan"} == {"schema", "error", "hint", "exit_code"}
    assert document["schema"] == "moetune.error/1"
    assert document["exit_code"] == code
    assert document["error"] in result.err


@pytest.mark.parametrize(("text", "words"), [
    (TOML[: TOML.index("[[collective]]") + 40], ("not valid TOML", "line")),
    ("not = = toml", ("not valid TOML", "line 1")),
    ("", ("lacks the key 'schema'",)),
])  # fmt: skip
def test_a_broken_profile_is_named_with_place(cli: Cli, text: str, words: tuple[str, ...]) -> None:
    Path("lab.toml").write_text(text, encoding="utf-8")
    for arguments in (
        ("plan", "--model", "gpt-s", "--profile", "lab.toml"),
        ("profiles", "import", "lab.toml"),
        ("profiles", "show", "./lab.toml"),
    ):
        result = cli(*arguments)
        assert (result.code, result.out) == (2, "")
        assert "lab.toml" in result.err
        for word in words:
            assert word in result.err


def test_a_broken_plan_file_is_named_with_its_place(cli: Cli) -> None:
    text = cli(*PLAN, "--json").out
    plan = json.loads(text)
    edited = {**plan, "inputs": {**plan["inputs"], "tokens_per_rank": 7}}
    less = {key: value for key, value in plan.items() if key != "memory"}
    for broken, words in (
        (text[: len(text) // 2], ("not valid JSON", "line 1")),
        ("", ("not valid JSON",)),
        ("[1]", ("lacks the key 'schema'",)),
        ("[" * 100_000, ("nested too deeply",)),
        (json.dumps({**plan, "schema": 9}), ("schema 9", "reads 1")),
        (json.dumps({**plan, "extra": 9}), ("unknown key 'extra'",)),
        (json.dumps(less), ("lacks the key 'memory'",)),
        (json.dumps(edited), ("id is not the hash of inputs",)),
    ):
        Path("plan.json").write_text(broken, encoding="utf-8")
        result = cli("explain", "plan.json")
        assert (result.code, result.out) == (2, "")
        for word in ("plan.json", *words):
            assert word in result.err


@pytest.mark.parametrize("command", ["list", "plan", "explain", "check", "doctor"])
def test_a_file_that_is_no_database_is_bad_input_and_stays_as_it_is(cli: Cli, command: str) -> None:
    notes = Path("notes.txt")
    notes.write_text("these are notes, " * 99, encoding="utf-8")
    arguments = {
        "list": ("profiles", "list"), "plan": PLAN, "explain": ("explain", "abc"),
        "check": ("db", "check"), "doctor": ("doctor",),
    }[command]  # fmt: skip
    result = cli("--db", "notes.txt", *arguments)
    assert result.code == 2
    assert "notes.txt" in result.err + result.out
    assert "is no database" in result.err + result.out
    assert notes.read_text(encoding="utf-8") == "these are notes, " * 99


def _make_newer(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE moetune_revision SET version_num = '9999'")
    connection.close()


@pytest.mark.parametrize("arguments", [
    ("profiles", "list"), ("profiles", "show", "lab"), ("profiles", "remove", "lab"),
    (*PLAN, "--profile", "lab"), ("plan", "--model", "gpt-s"), ("explain", "abc"),
    ("db", "check"), ("db", "upgrade"), ("doctor",),
])  # fmt: skip
def test_a_newer_schema_exits_with_7(cli: Cli, database: Path, arguments: tuple[str, ...]) -> None:
    assert cli("db", "upgrade").code == 0
    _make_newer(database)
    result = cli(*arguments)
    assert result.code == 7
    assert "newer moetune" in result.err + result.out


@pytest.mark.parametrize("arguments", [PLAN, QWEN])
def test_a_newer_schema_is_a_warning_to_who_needs_a_reference_machine(
    cli: Cli, database: Path, arguments: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert cli("db", "upgrade").code == 0
    _make_newer(database)
    assert cli(*arguments).code == 0
    (warning,) = caplog.messages
    assert "9999" in warning


def test_an_older_file_is_upgraded_by_the_first_command(
    cli: Cli, database: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cli("db", "upgrade").code == 0
    database.unlink()
    with sqlite3.connect(database) as connection:
        connection.executescript(OLD_SCHEMA.read_text())
    connection.close()
    database.chmod(0o600)
    assert "old" in cli("profiles", "list").out
    assert cli("db", "check").code == 0
    assert [message.count("is upgraded to schema") for message in caplog.messages] == [1]


def test_a_wrong_setting_file_names_file_and_key(cli: Cli) -> None:
    for text, words in (
        ("max_degre = 8", ("unknown key 'max_degre'", "did you mean 'max_degree'?")),
        ('max_degree = "8"', ("max_degree must be a whole number, got '8'",)),
        ("max_degree = 0", ("max_degree must be at least 1",)),
        ('dtype = "float8"', ("'float8' is unknown",)),
        ('budget = "soon"', ("'soon'",)),
        ('preset = "slow"', ("quick, full",)),
        ("max_degree = ", ("not valid TOML",)),
    ):
        Path("moetune.toml").write_text(text, encoding="utf-8")
        result = cli("profiles", "list")
        assert (result.code, result.out) == (2, "")
        for word in (str(Path("moetune.toml").resolve()), *words):
            assert word in result.err
        assert cli("--no-config", "profiles", "list").code == 0
        assert cli("plan", "--help").code == 0


def test_two_v_print_the_traceback(cli: Cli) -> None:
    assert "Traceback" in cli("-vv", "models", "show", "x").err
    assert "Traceback" not in cli("-v", "models", "show", "x").err
