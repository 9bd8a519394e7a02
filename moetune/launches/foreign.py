"""Checks for files and commands of runtimes that are not read, although some keys are known."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from moetune.domain.errors import InputError
from moetune.launches.entries import Entry

BRIDGE_KEYS = frozenset(f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
"""Keys that identify Megatron-Bridge's configurations."""
_OF_AXOLOTL = frozenset({"base_model", "micro_batch_size"})
_NOT_OF_TRAINER = frozenset({"tensor_parallel_size", "context_parallel_size",
                             "sequence_parallel_degree", "expert_parallel_size"})  # fmt: skip


@cache
def _table() -> Mapping[str, Any]:
    file = Path(__file__).with_suffix(".toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def check_text(name: str, text: str, field: str = "keys") -> None:
    """Raise InputError if the text of a file is for a runtime that is not read."""
    for words, line, runtime in _matches(field, text):
        what = f"{name}, line {line}: {words[-1].strip()} is of {runtime['name']}"
        raise InputError(f"{what}, whose files are not read", runtime["instead"])


def check_command(text: str, line: int) -> None:
    """Raise InputError if the words of a command start a runtime that is not read."""
    for words, _, runtime in _matches("command", text):
        what = f"line {line}: {words[0].split()[-1]} is of {runtime['name']}"
        raise InputError(f"{what}, whose arguments are not read", runtime["instead"])


def _matches(field: str, text: str) -> Iterator[tuple[list[str], int, Mapping[str, str]]]:
    """Yield matched lines, the first line's number, and the runtime whose pattern matches."""
    for runtime in _table()["runtimes"]:
        if match := re.search(runtime.get(field, "(?!)"), text, re.MULTILINE):
            yield match[0].strip().splitlines(), text.count("\n", 0, match.start()) + 1, runtime


def is_axolotl(entries: Iterable[Entry]) -> bool:
    """Return whether a file is axolotl's, which names the Trainer's keys differently.

    Raises:
        InputError: the file uses a parallelism that is not planned for the Trainer.
    """
    values = {entry.path: entry for entry in entries}
    if not values.keys() >= _OF_AXOLOTL:
        return False
    for path in _NOT_OF_TRAINER & values.keys():
        if values[path].value not in (None, 1):
            what = f"line {values[path].line}: {path} {values[path].value} of axolotl"
            raise InputError(f"{what} is not planned", "leave it at 1, or plan --target torchtitan")
    return True


def check_runtime(entries: Iterable[Entry]) -> None:
    """Raise InputError if a file has Megatron's sizes in a section of another runtime.

    Examples are Primus and NeMo 1, which has a section for its trainer.
    """
    paths = {entry.path: entry.line for entry in entries}
    sections = {path.rpartition(".")[0] for path in paths}
    for path, line in paths.items():
        section, _, leaf = path.rpartition(".")
        is_foreign = section not in ("", "model") or "trainer" in sections
        if leaf in BRIDGE_KEYS and is_foreign:
            raise InputError(
                f"line {line}: {path} is of a runtime whose files are not read",
                "give the script with Megatron's arguments that it becomes, or plan its sizes:  "
                "moetune plan --tp 2 --pp 4",
            )
