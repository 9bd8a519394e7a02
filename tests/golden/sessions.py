"""Commands as a user types them, right and wrong, and all that they print.

The lines behind `$` in a file of `sessions/` run one behind another in a folder with `files/` and a
store. `python -m tests.golden.sessions` writes what they print anew, with names that of some.
"""

import contextlib
import io
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from moetune.cli import app
from tests.golden.answers import FOLDER
from tests.golden.cases import LAB
from tests.golden.screens import HASH, SCRIPT

SESSION_FOLDER = FOLDER.with_name("sessions")
SESSIONS = tuple(sorted(path.stem for path in SESSION_FOLDER.glob("*.txt")))
_LINE = re.compile(r"^\$ moetune (.*)$", re.MULTILINE)
_DATE = re.compile(r"\d\d-\d\d \d\d:\d\d")


def session(name: str, folder: Path) -> str:
    """Return what each line prints, errors and exit codes with it; without hashes and dates."""
    shutil.copytree(SESSION_FOLDER / "files", folder, dirs_exist_ok=True)
    shutil.copy(SCRIPT, folder)
    with contextlib.chdir(folder):
        text = "\n".join(map(_shown, _LINE.findall(frozen_session(name))))
    text = _DATE.sub("mm-dd hh:mm", text.replace(LAB, "{lab}"))
    return HASH.sub(lambda match: "x" * len(match[0]), text)


def frozen_session(name: str) -> str:
    """Return a session as it was."""
    return (SESSION_FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def _shown(line: str) -> str:
    printed, words = io.StringIO(), shlex.split(line.replace("{lab}", LAB))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = app.main(("--no-config", "--db", "sqlite:///store.db", *words))
    return f"$ moetune {line}\n{printed.getvalue()}[{code}]\n"


if __name__ == "__main__":
    for session_name in sys.argv[1:] or SESSIONS:
        with tempfile.TemporaryDirectory() as scratch:
            text = session(session_name, Path(scratch))
        (SESSION_FOLDER / f"{session_name}.txt").write_text(text, encoding="utf-8")
        print(session_name)  # noqa: T201 - a tool for the developer's terminal
