"""Every exit code, and every kind of wrong input: one clear message, nothing half-written."""

import json
import sqlite3
from pathlib import Path

import pytest

from moetune.workflows.files import bundled_profiles
from tests.cli.running import Cli

PLAN = ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64")
TOML = bundled_profiles()["rtx2080ti-x64"].read_text(encoding="utf-8")


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("plan",), 2, ("nothing to plan for", "--model")),
        (("plan", "--model", "gpt-xll"), 2, ("'gpt-xll' is unknown", "did you mean gpt-xl?")),
        (("plan", "--model", "mixtral-8x7"), 2, ("did you mean mixtral-8x7b?", "models list")),
        (("plan", "--model", ""), 2, ("model '' is unknown",)),
        (("plan", "--model", "gpt-xl", "--profile", ""), 5, ("profile '' is unknown",)),
        (("plan", "--model", "gpt-s"), 5, ("none was measured", "moetune profile")),
        (("plan", "--model", "gpt-s", "--d-model", "8"), 2, ("exclude each other",)),
        (("plan", "--model", "gpt-s", "--top-k", "2"), 2, ("--top-k exclude each other",)),
        (("plan", "--d-model", "8"), 2, ("lacks --d-hidden, --num-experts",)),
        (("plan", "--top-k", "2"), 2, ("lacks --d-model",)),
        ((*PLAN, "--tokens", "8q"), 2, ("'8q'", "k, m")),
        ((*PLAN, "--tokens", "0"), 2, ("--tokens must be at least 1, got 0",)),
        ((*PLAN, "--tokens", "1.3"), 2, ("'1.3' is not a whole number",)),
        ((*PLAN, "--tokens", "-5"), 2, ("'-5'",)),
        ((*PLAN, "--tokens", "1k", "--batch", "2"), 2, ("exclude each other",)),
        ((*PLAN, "--batch", "2"), 2, ("--batch and --seq go together",)),
        ((*PLAN, "--memory-limit", "40GX"), 2, ("'40GX'", "gib")),
        ((*PLAN, "--max-degree", "257"), 2, ("--max-degree must be from 1 to 256, got 257",)),
        ((*PLAN, "--tokens", "3000m"), 2, ("--tokens must be from 1 to 2147483648",)),
        ((*PLAN, "--world-size", "9999999"), 2, ("--world-size must be from 1 to 1048576",)),
        ((*PLAN, "--memory-limit", "0"), 2, ("--memory-limit must be at least 1",)),
        ((*PLAN, "--world-size", "0"), 2, ("--world-size", "moetune plan --help")),
        ((*PLAN, "--world-size", "48"), 2, ("num_experts (64) does not divide", "48")),
        ((*PLAN, "--dtype", "int7"), 2, ("'int7' is unknown", "bfloat16")),
        ((*PLAN, "--dtype", "float64"), 5, ("no GEMM measured in float64", "moetune profile")),
        ((*PLAN, "--order", "backwards"), 2, ("backwards", "interleaved")),
        ((*PLAN, "--forward-degree", "0"), 2, ("--forward-degree",)),
        ((*PLAN, "--memory-limit", "1MB"), 3, ("memory binds",)),
        ((*PLAN, "--output", "no/such/plan.json"), 2, ("no/such/plan.json cannot be written",)),
        ((*PLAN, "--output", "."), 2, ("cannot be written",)),
        (("plan", "--model", "gpt-s", "--profile", "lab.toml"), 2, ("lab.toml cannot be read",)),
        (
            ("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x46"),
            5,
            ("'rtx2080ti-x46' is unknown", "did you mean rtx2080ti-x64?"),
        ),
        ((*PLAN, "--d-modle", "8"), 2, ("--d-modle", "--d-model")),
        ((*PLAN, "-q"), 2, ("write it before the command",)),
        (("plane",), 2, ("'plane'", "'plan'")),
        (("profiles", "lits"), 2, ("'lits'", "'list'", "moetune profiles --help")),
        (("explain",), 2, ("Missing argument 'plan'",)),
        (("explain", "abc"), 2, ("begins with 'abc'", "moetune plan")),
        (("explain", "plan.json"), 2, ("plan.json cannot be read",)),
        (("models", "show", "tm1"), 2, ("did you mean tm-1?",)),
        (("models", "show", "tm-1", "--world-size", "0"), 2, ("--world-size",)),
        (("profiles", "show", "nothing"), 5, ("'nothing' is unknown",)),
        (("profiles", "remove", "nothing"), 5, ("'nothing' is unknown",)),
        (("profiles", "remove", "rtx2080ti-x64"), 5, ("comes with moetune",)),
        (("profiles", "import", "lab.toml"), 2, ("lab.toml cannot be read",)),
        (("profiles", "export", "rtx2080ti-x64", "--output", "/no/x"), 2, ("/no/x cannot be",)),
        (("db", "check"), 2, ("there is no moetune database",)),
        (("db", "backup", "copy.db"), 2, ("there is no moetune database",)),
        (("--config", "none.toml", "config", "show"), 2, ("none.toml cannot be read",)),
        (("--db", "mysql://x/y", "profiles", "list"), 2, ("'mysql'", "postgresql")),
        (("--db", "", "profiles", "list"), 2, ("db must not be empty",)),
    ],
)
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
    assert set(document) == {"schema", "error", "hint", "exit_code"}
    assert document["schema"] == "moetune.error/1"
    assert document["exit_code"] == code
    assert document["error"] in result.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TOML[: TOML.index("[[collective]]") + 40], ("not valid TOML", "line")),
        ("not = = toml", ("not valid TOML", "line 1")),
        ("", ("lacks the key 'schema'",)),
        (TOML.replace("schema = 1", "schema = 2"), ("schema 2", "reads 1")),
        (TOML.replace("alpha_seconds", "alpha_secs"), ("gemm[0]", "did you mean")),
        (TOML.replace("6.19e-5", '"fast"'), ("profile.gemm[0].alpha_seconds", "'fast'")),
        (TOML.replace("6.19e-5", "nan"), ("profile.gemm[0].alpha_seconds", "finite")),
        (TOML.replace("num_devices = 64", "num_devices = 0"), ("machine", "num_devices")),
        (TOML.replace('"published"', '"guessed"'), ("profile.provenance", "guessed")),
        (TOML.replace("group_size = 64", ""), ("collective[0] lacks the key 'group_size'",)),
    ],
)
def test_a_broken_profile_file_is_named_with_its_place(
    cli: Cli, text: str, words: tuple[str, ...]
) -> None:
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


def test_a_profile_file_that_is_no_text_is_bad_input(cli: Cli) -> None:
    Path("lab.toml").write_bytes(b"\xff\xfe\x00schema")
    result = cli("plan", "--model", "gpt-s", "--profile", "lab.toml")
    assert result.code == 2
    assert "lab.toml is not UTF-8 text" in result.err


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


@pytest.mark.parametrize("command", ["list", "plan", "explain", "current", "check", "doctor"])
def test_a_file_that_is_no_database_is_bad_input_and_stays_as_it_is(cli: Cli, command: str) -> None:
    notes = Path("notes.txt")
    notes.write_text("these are notes, " * 99, encoding="utf-8")
    arguments = {
        "list": ("profiles", "list"),
        "plan": PLAN,
        "explain": ("explain", "abc"),
        "current": ("db", "current"),
        "check": ("db", "check"),
        "doctor": ("doctor",),
    }[command]
    result = cli("--db", "notes.txt", *arguments)
    assert result.code == 2
    assert "notes.txt" in result.err + result.out
    assert "is no database" in result.err + result.out
    assert notes.read_text(encoding="utf-8") == "these are notes, " * 99


def _make_older(database: Path) -> None:
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE moetune_revision SET version_num = '0001'")
    connection.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ("profiles", "list"),
        ("profiles", "show", "rtx2080ti-x64"),
        ("profiles", "remove", "lab"),
        PLAN,
        ("plan", "--model", "gpt-s"),
        ("explain", "abc"),
        ("db", "current"),
        ("db", "check"),
        ("doctor",),
    ],
)
def test_an_older_schema_is_said_and_exits_7(
    cli: Cli, database: Path, arguments: tuple[str, ...]
) -> None:
    assert cli("db", "upgrade").code == 0
    _make_older(database)
    result = cli(*arguments)
    assert result.code == 7
    assert "moetune db upgrade" in result.err + result.out


def test_a_newer_schema_is_refused_even_by_upgrade(cli: Cli, database: Path) -> None:
    assert cli("db", "upgrade").code == 0
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE moetune_revision SET version_num = '9999'")
    connection.close()
    for arguments in (("db", "upgrade"), ("profiles", "list")):
        result = cli(*arguments)
        assert result.code == 7
        assert "newer moetune" in result.err


def test_an_older_schema_is_no_matter_to_what_needs_no_database(cli: Cli, database: Path) -> None:
    assert cli("db", "upgrade").code == 0
    _make_older(database)
    profile = str(bundled_profiles()["rtx2080ti-x64"])
    plan = ("plan", "--model", "gpt-s", "--profile", profile, "--no-save")
    for arguments in (("models", "list"), ("config", "show"), plan):
        assert cli(*arguments).code == 0


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
        result = cli("config", "show")
        assert (result.code, result.out) == (2, "")
        for word in (str(Path("moetune.toml").resolve()), *words):
            assert word in result.err
        assert cli("--no-config", "config", "show").code == 0
        assert cli("plan", "--help").code == 0


def test_two_v_print_the_traceback(cli: Cli) -> None:
    assert "Traceback" in cli("-vv", "models", "show", "x").err
    assert "Traceback" not in cli("-v", "models", "show", "x").err


def test_an_older_schema_can_be_copied_before_it_is_upgraded(cli: Cli, database: Path) -> None:
    assert cli("db", "upgrade").code == 0
    _make_older(database)
    assert cli("db", "backup", "before.db").code == 0
    assert cli("--db", "before.db", "db", "current").code == 7
