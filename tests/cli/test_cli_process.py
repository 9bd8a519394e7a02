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
names = {{name.partition(".")[0] for name in sys.modules}}
print(json.dumps([code, sorted(names & set({heavy!r}))]), file=sys.stderr)
"""


def _environment(home: Path, **more: str) -> dict[str, str]:
    return {
        "PATH": os.defpath,
        "HOME": str(home),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        **more,
    }


def _loaded_by(home: Path, *arguments: str) -> tuple[int, list[str]]:
    code = LOADED.format(arguments=arguments, heavy=HEAVY)
    done = subprocess.run(
        (sys.executable, "-c", code),
        env=_environment(home), cwd=home, capture_output=True, text=True, check=True,
    )  # fmt: skip
    exit_code, names = json.loads(done.stderr.splitlines()[-1])
    return exit_code, names


def test_help_loads_no_heavy_library(tmp_path: Path) -> None:
    for arguments in (("--help",), ("plan", "--help"), ("profile", "--help"), ("db", "--help")):
        assert _loaded_by(tmp_path, *arguments) == (0, [])


def test_help_of_the_program_loads_no_command_and_no_domain(tmp_path: Path) -> None:
    code = LOADED.replace('name.partition(".")[0]', "name").format(
        arguments=("--help",),
        heavy=("moetune.cli.plan", "moetune.cli.profile", "moetune.domain.plan", "rich", "numpy"),
    )
    done = subprocess.run(
        (sys.executable, "-c", code),
        env=_environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stderr) == [0, []]


def test_planning_on_a_published_profile_loads_no_torch(tmp_path: Path) -> None:
    arguments = ("plan", "--model", "tm-1", "--profile", "rtx2080ti-x64")
    code, names = _loaded_by(tmp_path, *arguments)
    assert code == 0
    assert not {"torch", "optuna"} & set(names)


def test_json_without_the_store_loads_neither_database_nor_rich(tmp_path: Path) -> None:
    code, names = _loaded_by(tmp_path, "models", "list", "--json")
    assert (code, names) == (0, [])


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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_the_signs_still_gets_the_answer(
    tmp_path: Path, encoding: str
) -> None:
    done = subprocess.run(
        (*MOETUNE, "plan", "--model", "gpt-xl", "--profile", "rtx2080ti-x64", "--no-save"),
        env=_environment(tmp_path, PYTHONIOENCODING=encoding, PYTHONUTF8="0"),
        capture_output=True, check=True,
    )  # fmt: skip
    assert b"Cut the tokens into" in done.stdout


def test_a_failing_command_exits_with_its_code_from_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        (*MOETUNE, "plan", "--model", "gpt-s"),
        env=_environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 5
    assert done.stderr.startswith("error: ")


def test_a_narrow_terminal_breaks_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        (*MOETUNE, "plan", "--model", "tm-1", "--profile", "rtx2080ti-x64", "--no-save"),
        env=_environment(tmp_path, COLUMNS="5"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
