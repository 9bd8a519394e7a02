"""The commands of a shell script, and the places of words in files that it reads with `source`.

Such a file is read, and never run, if it is in the script's folder or the current folder.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from moetune.launches.expansion import Word
from moetune.launches.reading import LARGEST_BYTES

_LINES_OF_A_FILE = 10**9
"""Line k of the n-th file that a script reads has the number n times this, plus k."""
_MOST_FILES = 20


class Note(NamedTuple):
    """A note on a part of a file that is left aside, with its line."""

    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCommand:
    """A command of a script.

    Args:
        environment: assignments before its first word, and exported variables.
        notes: in which turns of loops it stands.
    """

    words: tuple[Word, ...]
    line: int
    environment: Mapping[str, Word]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellScript:
    """The commands of a script, and notes on the parts that are left aside.

    Args:
        more: words after the script's name that it does not pass on.
    """

    commands: tuple[ShellCommand, ...]
    notes: tuple[Note, ...]
    more: tuple[Word, ...] = ()


@dataclass(slots=True)
class SourcedFiles:
    """Files that a script reads, in their order.

    Args:
        folder: folder of the script; None to read no file.
        places: their names, and the lines of the script that read them.
    """

    folder: Path | None = None
    places: list[tuple[str, int]] = field(default_factory=list)

    def text_of(self, word: Word) -> str | None:
        """Return the text of a file that a word names; None if it is not read."""
        is_read = self.folder and not word.missing and len(self.places) < _MOST_FILES
        for folder in (self.folder.resolve(), Path.cwd()) if self.folder and is_read else ():
            file = (folder / word.text).resolve()
            if not (file.is_relative_to(folder) and file.is_file()):
                continue
            with suppress(OSError, UnicodeDecodeError):
                if file.stat().st_size <= LARGEST_BYTES:
                    return file.read_text(encoding="utf-8").replace("\0", "")
        return None

    def first_line(self, word: Word) -> int:
        """Register a file that is read next, and return the number of its first line."""
        self.places.append((word.text, self._place_of(word.line)[0]))
        return len(self.places) * _LINES_OF_A_FILE + 1

    def named(self, script: ShellScript) -> ShellScript:
        """Return a script in which words from these files have a file's name instead of a line."""
        commands = (
            ShellCommand(
                words=tuple(map(self._word, command.words)), line=self._place_of(command.line)[0],
                environment={name: self._word(word) for name, word in command.environment.items()},
                notes=self._notes(command.notes),
            ) for command in script.commands
        )  # fmt: skip
        return replace(script, commands=tuple(commands), notes=self._notes(script.notes))

    def _notes(self, notes: Iterable[Note]) -> tuple[Note, ...]:
        return tuple(
            Note(f"{name}: {text}" if name else text, number) for text, line in notes
            for number, name in [self._place_of(line)]
        )  # fmt: skip

    def _place_of(self, line: int) -> tuple[int, str]:
        """Return the line of the script that a line comes from, and the read file's name or ""."""
        number = line // _LINES_OF_A_FILE
        name, reads = self.places[number - 1] if number else ("", line)
        return reads, name

    def _word(self, word: Word) -> Word:
        _, name = self._place_of(word.line)
        return word._replace(line=0, file=name) if name else word
