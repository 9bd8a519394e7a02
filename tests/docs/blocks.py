"""The fenced blocks of a page, with the note that stands in a comment above them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w+-]*)(?P<more>.*)$")
_NOTE = re.compile(r"^<!-- (?P<note>.+?) -->$")
_TITLE = re.compile(r'title="([^"]+)"')
_COMMAND = re.compile(r"^ {4,}(\$ )?(moetune|make|torchrun|srun|python) ")

_COMMANDS = re.compile(
    r"(?:-m |(?<![\w/.:'\"#=-]))moetune "
    r"((?:--db|--config|--no-config|--no-color|-v|-q|[a-z])[^\n'\"|;&`>]*)"
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block.

    Args:
        where: page and line.
        title: the file that the block is saved as, empty for none.
        note: the comment above it, empty for none.
    """

    where: str
    language: str
    title: str
    note: str
    text: str

    @property
    def reason(self) -> str | None:
        """Return why it is not run, None where it is."""
        head, _, reason = self.note.partition(": ")
        return reason if head == "not run" else None

    @property
    def exit_codes(self) -> set[int]:
        """Return the exit codes that its commands may have."""
        match = re.fullmatch(r"exit code (\d+)(?: or (\d+))?", self.note)
        return {int(code) for code in match.groups() if code} if match else {0}

    @property
    def runs_on(self) -> bool:
        """Return whether its command runs until the page ends."""
        return self.note == "runs until the page ends"


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order; a command outside of them is an error."""
    note, lines = "", iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            assert not _COMMAND.match(line), f"{page.name}:{number}: a command without a fence"
            match = _NOTE.match(line)
            note = match["note"] if match else note if not line.strip() else ""
            continue
        text: list[str] = []
        for _, inner in lines:
            if inner == fence["fence"]:
                break
            text.append(inner)
        title = _TITLE.search(fence["more"])
        yield Block(
            where=f"{page.name}:{number}", language=fence["language"],
            title=title[1] if title else "", note=note, text="\n".join(text) + "\n",
        )  # fmt: skip
        note = ""


def commands_of(text: str) -> Iterator[str]:
    """Yield a shell block's commands; lines that belong together are one."""
    command = ""
    for line in text.splitlines():
        if not command and (not line.strip() or line.lstrip().startswith("#")):
            continue
        command += line
        if command.endswith("\\"):
            command = command[:-1]
            continue
        yield command
        command = ""
    assert not command, f"the block ends within a command: {command}"


def conversation_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a console block's commands, each with the output that is shown."""
    command, output = "", list[str]()
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, output
            command, output = line[2:], []
        elif command.endswith("\\"):
            command = command[:-1] + line
        else:
            output.append(line)
    assert command, "a console block without a command"
    yield command, output


def moetune_commands(text: str) -> Iterator[str]:
    """Yield what follows `moetune` in any text that holds commands, quotes and all."""
    joined = re.sub(r"\\\n\s*", " ", text)
    joined = re.sub(r"(?m)^(\s+)(?=-)", " ", re.sub(r"\n\s+(?=-[a-z-])", " ", joined))
    for match in _COMMANDS.finditer(joined):
        yield match[1].partition(" #")[0].strip()
