"""The program as a process: what it loads, how it ends, what it leaves."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MOETUNE = (sys.executable, "-m", "moetune")
HEAVY = ("torch", "sqlalchemy", "optuna", "alembic", "rich", "numpy")
LOADED = """
import json, sys
from moetune.cli import app
code = app.main({arguments!r})
print(json.dumps([code, sorted({{*sys.modules}} & {{*{unwanted!r}}})]), file=sys.stderr)
"""


def _environment(home: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.defpath, "HOME": str(home),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]), **more}  # fmt: skip


def _run(
    home: Path, *words: str, check: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run((sys.executable, *words), env=_environment(home, **(environment or {})),
                          cwd=home, capture_output=True, text=True, check=check, encoding="utf-8",
                          errors="replace")  # fmt: skip


@pytest.mark.parametrize(("arguments", "unwanted"), [
    (("--help",), (*HEAVY, "moetune.cli.plan", "moetune.cli.profile", "moetune.domain.plan")),
    (("plan", "--help"), (*HEAVY, "moetune.domain.plan")),
    (("profile", "--help"), HEAVY),
    (("db", "--help"), HEAVY),
    (("models", "list", "--json"), HEAVY),
    (("models", "show", "deepseek-v3", "--json"), (*HEAVY, "moetune.cli.plan")),
    (("plan", "--model", "tm-1", "--profile", "rtx2080ti-x64"), ("torch", "optuna")),
])  # fmt: skip
def test_a_command_loads_no_more_than_it_uses(
    tmp_path: Path, arguments: tuple[str, ...], unwanted: tuple[str, ...]
) -> None:
    done = _run(tmp_path, "-c", LOADED.format(arguments=arguments, unwanted=unwanted))
    assert json.loads(done.stderr.splitlines()[-1]) == [0, []]


def test_a_reader_that_leaves_ends_the_program_without_a_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        (*MOETUNE, "models", "list", "--json"),
        env=_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        err = program.stderr.read()
        code = program.wait(timeout=240)
    assert code == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_the_interrupt_key_ends_the_program_with_130(tmp_path: Path) -> None:
    fifo = tmp_path / "slow.toml"
    os.mkfifo(fifo)
    # Opening the other end returns when the program waits for what is in the file.
    with (
        subprocess.Popen(
            (*MOETUNE, "plan", "--model", "tm-1", "--profile", str(fifo), "--no-save"),
            env=_environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as program,
        fifo.open("w", encoding="utf-8"),
    ):  # fmt: skip
        out, err = _interrupted(program)
    assert program.returncode == 130
    assert out == ""
    assert "Traceback" not in err


def _interrupted(program: "subprocess.Popen[str]") -> tuple[str, str]:
    """Interrupt a program that opens a file, again where the key fell between open and read."""
    for _ in range(12):
        program.send_signal(signal.SIGINT)
        try:
            return program.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            continue
    program.kill()
    raise AssertionError("the program ignores the interrupt key")


@pytest.mark.parametrize("environment", [
    {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"},
    {"COLUMNS": "5"},
])  # fmt: skip
def test_a_terminal_without_the_signs_or_with_few_columns_still_gets_the_answer(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    plan = ("plan", "--model", "gpt-xl", "--profile", "rtx2080ti-x64", "--no-save")
    done = _run(tmp_path, *MOETUNE[1:], *plan, environment=environment)
    assert "Cut the tokens into" in " ".join(done.stdout.split())


def test_a_failing_command_exits_with_its_code_from_the_process(tmp_path: Path) -> None:
    done = _run(tmp_path, *MOETUNE[1:], "plan", "--model", "gpt-s", check=False)
    assert done.returncode == 5
    assert done.stderr.startswith("error: ")
