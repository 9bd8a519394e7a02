"""Scores of answers against what moetune itself says when they are scored."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.skills.questions import Key, Question

Json = str | int | float | bool | None
_ANSWERED = {0, 6}
"""Exit codes of commands that answer: 6 is of a launch that does not start."""


def truth_of(question: Question) -> dict[str, Json]:
    """Return the right values by key, computed in an empty folder and an empty store."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in question.files.items():
            Path(folder, name).write_text(text.lstrip(), encoding="utf-8")
        environ = {**os.environ, "XDG_DATA_HOME": folder, "PYTHONPATH": str(Path.cwd())}
        runs = [
            subprocess.run(
                (sys.executable, "-m", "moetune", *shlex.split(command), "--json"),
                cwd=folder, env=environ, capture_output=True, text=True, check=False,
            )
            for command in question.commands
        ]  # fmt: skip
    documents = [json.loads(run.stdout) for run in runs]
    values = {name: _value(key, documents[key.of]) for name, key in question.keys.items()}
    return {"answerable": runs[-1].returncode in _ANSWERED, **values}


def _value(key: Key, document: object) -> Json:
    value: Any = document
    for name in filter(None, key.path.split(".")):
        value = value[int(name)] if isinstance(value, list) else value[name]
    if key.pattern:
        match = re.search(key.pattern, str(value))
        return match and match[1]
    if isinstance(value, bool | str | None):
        return value
    return float(value) / key.unit


def right_keys(question: Question, truth: Mapping[str, Any], text: str) -> Iterator[bool]:
    """Yield for each key whether the last JSON object of an answer has it right."""
    answer = last_object(text)
    for name, value in truth.items():
        key = question.keys.get(name, Key(means="", path=""))
        yield name in answer and _is_right(key, answer[name], value)


def _is_right(key: Key, given: Json, truth: Json) -> bool:
    if truth is None or given is None or isinstance(truth, bool) or isinstance(given, bool):
        return given is truth
    if key.named:
        words = [{*re.findall(r"[\w.-]*\w", str(text))} for text in (given, truth)]
        return not words[0].isdisjoint(words[1])
    try:
        return abs(float(given) - float(truth)) <= key.within * abs(float(truth))
    except (TypeError, ValueError):
        return str(given).strip(" $`\"'") == str(truth)


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object in a text; empty without any."""
    decoder, place = json.JSONDecoder(), text.find("{")
    last: dict[str, Any] = {}
    while place >= 0:
        try:
            last, end = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            end = place + 1
        place = text.find("{", end)
    return last


def table(questions: Sequence[Question], folders: Sequence[Path]) -> Iterator[str]:
    """Yield the table of whole answers and keys that are right, by skill, for each folder."""
    truths = {question.name: truth_of(question) for question in questions}
    heads = [f"{folder.name}: answers | keys" for folder in folders]
    yield f"| skill | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * (2 * len(folders))
    names = {question.name.partition("-")[0]: None for question in questions}
    for skill in (*names, ""):
        mine = [row for row in questions if row.name.startswith(skill)]
        cells = [_cells(mine, truths, folder) for folder in folders]
        yield f"| {skill or 'all'} | {' | '.join(cells)} |"
    for question in questions:
        marks = [
            "".join("+" if is_right else "-" for is_right in _marks(question, truths, folder))
            for folder in folders
        ]
        yield f"{question.name}: {' '.join(marks)}  {json.dumps(truths[question.name])}"


def _cells(rows: Sequence[Question], truths: Mapping[str, Any], folder: Path) -> str:
    marks = [[*_marks(row, truths, folder)] for row in rows]
    keys = [is_right for row in marks for is_right in row]
    return f"{sum(map(all, marks))} of {len(marks)} | {sum(keys)} of {len(keys)}"


def _marks(question: Question, truths: Mapping[str, Any], folder: Path) -> Iterator[bool]:
    file = folder / f"{question.name}.txt"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return right_keys(question, truths[question.name], text)
