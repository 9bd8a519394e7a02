"""Someone who follows a page of the documentation and does what it says."""

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples import train_lm
from moetune.cli import app
from tests.docs.blocks import Block, blocks_of, commands_of, conversation_of, moetune_commands
from tests.docs.launched import launch
from tests.docs.parsing import parse

ROOT = Path(__file__).resolve().parents[2]
PORT = "8642"
PATIENCE_SECONDS = 100
BUDGETS = 5
"""How often the example's few seconds of measuring are given again where all cores are busy."""
SHELL = re.compile(r"[|>;&$`(]")
RUNS = {"console", "sh", "python", "toml", "json"}
SAYS = {"text"}
"""Neither commands nor code: a drawing, the message of a program."""


class Reader:
    """Someone who follows a page in an empty home, one block after the other."""

    def __init__(
        self, home: Path, port: int, capfd: pytest.CaptureFixture[str], measured: Path
    ) -> None:
        self._home, self._port, self._capfd, self._measured = home, str(port), capfd, measured
        self._names: dict[str, Any] = {"__name__": "page"}
        self._running: list[subprocess.Popen[bytes]] = []

    def read(self, page: Path) -> None:
        """Follow the whole page."""
        for block in blocks_of(page):
            self.follow(block)

    def follow(self, block: Block) -> None:
        """Do what the block says."""
        text = block.text.replace(PORT, self._port)
        if block.title:
            Path(block.title).write_text(text, encoding="utf-8")
        if block.language in SAYS:
            return
        if block.reason is not None:
            _check_what_is_not_run(block)
            return
        assert block.language in RUNS, f"{block.where}: neither run nor marked `not run: …`"
        if block.runs_on:
            self._start(block, text)
        else:
            self._run(block, text)

    def leave(self) -> None:
        """End what still runs."""
        for process in self._running:
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_SECONDS) == 0

    def _run(self, block: Block, text: str) -> None:
        if block.language == "sh":
            for command in commands_of(text):
                self._shell(block, command)
        elif block.language == "console":
            for command, shown in conversation_of(text):
                _compare(block, shown, self._shell(block, command))
        elif block.language == "toml":
            tomllib.loads(text)
        elif block.language == "json":
            json.loads(text)
        elif not block.title:
            exec(compile(text, block.where, "exec"), self._names)  # noqa: S102 - the page's own code

    def _shell(self, block: Block, command: str) -> str:
        # A program's output into a file needs no shell of its own, and no process.
        simple, _, file = command.partition(" > ")
        if command.startswith("moetune ") and file and not SHELL.search(simple + file):
            out = self._shell(block, simple)
            Path(file).write_text(out, encoding="utf-8")
            return out
        words = shlex.split(command, comments=True)
        if words[:2] == ["moetune", "profile"] and "--name" in words:
            code, out, err = self._measure(words[1:])
        elif words[0] == "moetune" and not SHELL.search(command.partition(" #")[0]):
            code, out, err = self._moetune(words[1:])
        elif words[:2] == ["torchrun", "--nproc-per-node"] and not SHELL.search(command):
            # With --standalone torchrun itself starts a script; the others start sooner.
            code, out = launch(words, environ=_environment(), timeout_seconds=PATIENCE_SECONDS)
            err = ""
        else:
            done = subprocess.run(
                ("bash", "-euo", "pipefail", "-c", command), env=_environment(),
                capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
            )  # fmt: skip
            code, out, err = done.returncode, done.stdout, done.stderr
        assert code in block.exit_codes, f"{block.where}: {command}\n{out}\n{err}"
        return out

    def _moetune(self, words: list[str]) -> tuple[int, str, str]:
        self._capfd.readouterr()
        code = app.main(words)
        out, err = self._capfd.readouterr()
        return code, out, err

    def _measure(self, words: list[str]) -> tuple[int, str, str]:
        """Measure once for all pages that say the same, until there is enough for a plan."""
        name = words[words.index("--name") + 1]
        kept = self._measured / (hashlib.sha256(" ".join(words).encode()).hexdigest() + ".toml")
        if kept.exists():
            return self._moetune(["profiles", "import", str(kept), "--name", name])
        answer = self._moetune(words)
        layer = words[words.index("--d-model") :]
        for _ in range(BUDGETS):
            if self._moetune(["plan", "--no-save", "--profile", name, *layer])[0] == 0:
                break
            answer = self._moetune([*words, "--resume"])
        assert self._moetune(["profiles", "export", name, "--output", str(kept)])[0] == 0
        return answer

    def _start(self, block: Block, text: str) -> None:
        (command,) = commands_of(text)
        words = shlex.split(command)
        assert words[:2] == ["moetune", "serve"], f"{block.where}: only the service runs on"
        with (self._home / "serve.log").open("wb") as log:
            process = subprocess.Popen(
                (sys.executable, "-m", *words), env=_environment(), stdout=log, stderr=log
            )
        self._running.append(process)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _answers(f"http://127.0.0.1:{self._port}/readyz"):
            assert process.poll() is None, (self._home / "serve.log").read_text()
            assert time.monotonic() < deadline, "the service does not begin"
            time.sleep(0.05)


def _environment() -> dict[str, str]:
    # Programs of this interpreter's environment come first: torchrun, moetune.
    programs = str(Path(sys.executable).parent)
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
    return {**os.environ, "PATH": programs + os.pathsep + os.environ["PATH"], "PYTHONPATH": path,
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # fmt: skip


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - the service's own address
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def _compare(block: Block, shown: list[str], printed: str) -> None:
    """Compare the numbers that a page shows with those of the program; `…` leaves some out.

    The words around them may change.
    """
    expected: list[str] = []
    for line in shown:
        expected += ["…"] if line.strip() == "…" else re.findall(r"\d[\d.,]*\d|\d", line)
    numbers = iter(re.findall(r"\d[\d.,]*\d|\d", printed))
    is_gap = False
    for number in expected:
        if number == "…":
            is_gap = True
            continue
        assert any(num == number for num in numbers) if is_gap else next(numbers, None) == number, (
            f"{block.where}: {number} is not what the program prints there:\n{printed}"
        )
        is_gap = False
    assert is_gap or next(numbers, None) is None, f"{block.where}: the output goes on:\n{printed}"


def _check_what_is_not_run(block: Block) -> None:
    assert block.reason, f"{block.where}: no reason"
    for command in moetune_commands(block.text):
        parse(command)
    for words in re.findall(r"-m examples\.train_lm (.+)", block.text):
        train_lm.parse(shlex.split(words))
    if block.language == "yaml":
        assert list(yaml.safe_load_all(block.text))
    if block.language == "sh":
        done = subprocess.run(
            ("bash", "-n"), input=block.text, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), f"{block.where}: {done.stderr}"
