"""Ask the command line a case's questions, and compare the answers with the frozen ones.

`python -m tests.golden.answers` writes them anew, `python -m tests.golden.answers NAME …` some.
"""

import contextlib
import io
import json
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from moetune.cli import app
from tests.golden.cases import CASES, DOCUMENTS, Case

FOLDER = Path(__file__).with_name("answers")
PROSE = frozenset({"why", "lost_because", "warnings", "words", "note", "file"})
"""Texts for people: they may be written better at any time, and their number holds."""
IDENTITY = frozenset({"schema", "id", "before_id", "after_id"})
"""A new version of a schema has new ids."""
RELATIVE_ERROR = 1e-9


def ask(case: Case, folder: Path) -> dict[str, Any]:
    """Return the documents that the commands print, by the name of the question.

    Args:
        folder: for the plan's file and the traces, and of a store that is not there: nobody's own
            store takes part.
    """
    ask_here = partial(_document, f"sqlite:///{folder / 'none.db'}")
    profile = case.plan[case.plan.index("--profile") + 1]
    plan, trace = folder / "plan.json", folder / "trace.json"
    shown = {"plan": ask_here("plan", *case.plan, "--no-save", "--output", str(plan))}
    for name, (command, *flags) in case.questions.items():
        arguments = [command, str(plan), *flags, "--profile", profile]
        if command == "trace":
            arguments += ["--output", str(trace)]
        answer = ask_here(*arguments)
        if command == "trace":
            answer["events"] = json.loads(trace.read_text())["traceEvents"]
        shown[name] = {key: value for key, value in answer.items() if key not in {"plan", "before"}}
    return shown


def differences(expected: object, actual: object, where: str = "") -> list[str]:
    """Return the places where the answers differ; what was added is no difference."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        lines = [f"{where}.{key} is missing" for key in expected if key not in actual]
        for key in set(expected) & set(actual) - IDENTITY:
            pair = expected[key], actual[key]
            if key in PROSE:
                pair = _num_texts(pair[0]), _num_texts(pair[1])
            lines += differences(*pair, f"{where}.{key}")
        return lines
    if isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            return [f"{where} has {len(actual)} entries instead of {len(expected)}"]
        pairs = enumerate(zip(expected, actual, strict=True))
        return [
            text for index, (left, right) in pairs
            for text in differences(left, right, f"{where}[{index}]")
        ]  # fmt: skip
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        if math.isclose(expected, actual, rel_tol=RELATIVE_ERROR, abs_tol=1e-15):
            return []
    elif expected == actual:
        return []
    return [f"{where} is {actual!r} instead of {expected!r}"]


def _num_texts(texts: object) -> int:
    return len(texts) if isinstance(texts, list) else int(bool(texts))


def frozen(name: str) -> dict[str, Any]:
    """Return a case's frozen answers."""
    answers = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(answers, dict)
    return answers


def answer(name: str, folder: Path) -> dict[str, Any]:
    """Return the answers of a case or of a document."""
    if name in CASES:
        return ask(CASES[name], folder)
    command, *arguments = DOCUMENTS[name]
    document = _document(f"sqlite:///{folder / 'none.db'}", command, *arguments)
    return {command: {key: value for key, value in document.items() if key != "samples"}}


def freeze(name: str) -> None:
    """Write a case's answers anew."""
    with tempfile.TemporaryDirectory() as folder:
        answers = answer(name, Path(folder))
    lines = (f"{json.dumps(key)}: {json.dumps(answers[key], sort_keys=True)}" for key in answers)
    FOLDER.mkdir(exist_ok=True)
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def _document(store: str, *arguments: str) -> dict[str, Any]:
    code, printed = document(store, *arguments)
    assert code == 0, (arguments, code, printed)
    return printed


def document(store: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the document of a command, or of its error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.main(("--no-config", "--db", store, *arguments, "--json"))
    printed = json.loads(out.getvalue())
    assert isinstance(printed, dict), err.getvalue()
    return code, printed


if __name__ == "__main__":
    for case_name in sys.argv[1:] or (*CASES, *DOCUMENTS):
        freeze(case_name)
        print(case_name)  # noqa: T201 - a tool for the developer's terminal
