"""Rows of figures, written as they come: what was measured before a failure stays.

A part appends one JSON object a line to its own file; the page reads them all.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class Rows:
    """The rows of one part.

    Args:
        folder: of all parts.
        part: its name.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self._path = folder / f"{part}.jsonl"

    def begin(self) -> None:
        """Forget those of an earlier run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("", encoding="utf-8")

    def add(self, **row: object) -> None:
        """Append one, and have it on the disk."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def __iter__(self) -> Iterator[Row]:
        if not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)
