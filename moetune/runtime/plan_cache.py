"""The last good answers of a plan service, for when it is away."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


class PlanCache:
    """A folder of plan files, named after the question that each one answers.

    Several jobs may share it: a file is there whole or not at all.

    Args:
        folder: made when the first plan is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def file(self, key: str) -> Path:
        """Return where the answer is."""
        return self._folder / f"{key}.json"

    def write(self, key: str, text: str) -> None:
        """Keep an answer.

        Raises:
            OSError: it cannot be written; an earlier one is as it was.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f".{key}.{secrets.token_hex(4)}.tmp"
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.file(key))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def read(self, key: str) -> bytes | None:
        """Return an answer, None where there is none.

        Raises:
            OSError: it cannot be read.
        """
        try:
            return self.file(key).read_bytes()
        except FileNotFoundError:
            return None
