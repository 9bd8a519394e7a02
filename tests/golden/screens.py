"""Screens of 80 columns that commands print for people, of whole models and launch files.

`python -m tests.golden.screens` writes them anew, `python -m tests.golden.screens NAME …` some.
"""

import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path

from moetune.cli import app
from tests.golden.answers import FOLDER
from tests.golden.cases import CASES

SCREEN_FOLDER = FOLDER.with_name("screens")
SCRIPT = Path(__file__).with_name("mixtral.sh")
HASH = re.compile(r"(?<![\w.])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{6,64}\b(?!-)")
PLANS = {
    "mixtral": (("explain",), ("explain", "--layout", "tp=2,pp=4,ep=8"), ("sensitivity",)),
    "qwen3-235b": (("explain", "--layout", "tp=4,pp=8,ep=8"), ("whatif", "--world-size", "128")),
    "gpt-oss-pinned": (
        ("explain",),
        ("whatif", "--constraint", "ep=4", "--memory-limit", "100GiB"),
    ),
    "deepseek-megatron-32": (("explain",),),
    "chunks": (("explain",), ("sensitivity",)),
    "uneven": (("explain", "--strategy", "S4"), ("sensitivity",)),
    "model-pinned": (("explain",),),
}  # fmt: skip
_MEMORY = ("memory", "qwen3-30b-a3b", "--seq", "4k", "--target")
SCREENS = {
    "memory": (*_MEMORY, "megatron", "--world-size", "16", "--device-memory", "80GB"),
    "memory-short": (*_MEMORY, "bridge", "--world-size", "8", "--device-memory", "40GB"),
    "memory-layout": (
        *_MEMORY, "torchtitan", "--world-size", "16", "--device-memory", "80GB", "--ep", "8",
        "--tp", "2",
    ),
    "check": ("check", SCRIPT.name, "--profile", "h100-x8"),
    "models": ("models", "list"),
    "model": ("models", "show", "qwen3-next"),
    "machines": ("profiles", "show", "h100-x8"),
}  # fmt: skip


def screen(name: str, folder: Path) -> str:
    """Return what the commands of a plan, or a command, print; without hashes."""
    store = ("--no-config", "--quiet", "--db", f"sqlite:///{folder / 'none.db'}")
    if name in SCREENS:
        return _printed((*store, *SCREENS[name]))
    arguments = CASES[name].plan
    profile = ("--profile", arguments[arguments.index("--profile") + 1])
    plan = str(folder / "plan.json")
    texts = [_printed((*store, "plan", *arguments, "--no-save", "--output", plan))]
    texts += [
        _printed((*store, command, plan, *flags, *profile)) for command, *flags in PLANS[name]
    ]
    return "\n".join(texts)


def frozen_screen(name: str) -> str:
    """Return a screen as it was."""
    return (SCREEN_FOLDER / f"{name}.txt").read_text(encoding="utf-8")


def _printed(arguments: tuple[str, ...]) -> str:
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(SCRIPT.parent), contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):  # fmt: skip
        code = app.main(arguments)
    assert code in {0, 6}, (  # 6: it does not start, or does not fit
        arguments,
        code,
        err.getvalue(),
    )
    return HASH.sub(lambda match: "x" * len(match[0]), out.getvalue())


if __name__ == "__main__":
    SCREEN_FOLDER.mkdir(exist_ok=True)
    for screen_name in sys.argv[1:] or (*PLANS, *SCREENS):
        with tempfile.TemporaryDirectory() as scratch:
            text = screen(screen_name, Path(scratch))
        (SCREEN_FOLDER / f"{screen_name}.txt").write_text(text, encoding="utf-8")
        print(screen_name)  # noqa: T201 - a tool for the developer's terminal
