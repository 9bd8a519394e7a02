"""Tests of a copy of the tree, in which something was changed to see whether they notice."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 600
"""A run that has not ended by then never does: something waits for ever."""
_LEFT_OUT = (".git", ".venv", "__pycache__", "site", ".mutants*", ".peers", "build")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first test that failed.

    Args:
        test: its id; "no end" or "no start" of a run without a failed test.
        complaint: the first line of what it said.
    """

    test: str
    complaint: str = ""


def copy_tree(to: Path) -> None:
    """Copy the tree as it stands, without what is built or kept."""
    shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*_LEFT_OUT))


def first_failure(
    tests: Sequence[str], tree: Path, *, patience_seconds: float = PATIENCE_SECONDS
) -> Failure | None:
    """Run tests of a copy until the first one fails; return None if none does."""
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=100",
        "--tb=short", *tests,
    ]  # fmt: skip
    variables = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, check=False, cwd=tree, env=variables, capture_output=True, text=True,
            timeout=patience_seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Failure(test="no end")
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    how = re.search(r"^E +(\S.*)$", done.stdout, re.MULTILINE)
    return Failure(test=failed[1] if failed else "no start", complaint=how[1] if how else "")
