"""A stream of the log lines that have a mark: a few MiB of memory for a log of any size."""

import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

_BLOCK_BYTES = 2**20
_LONGEST_BYTES, _READ_BYTES = 2**16, 2**13
"""Bytes after which a line without an end is cut, and the bytes of a line that are read."""
_WHOLE_BYTES, _MOST_LINES = 16 * 2**20, 1000
"""After the first `_WHOLE_BYTES` of a log, about `_MOST_LINES` lines per mark and block are read.
A median needs no more, and reading all steps of a long log takes long."""
_MOST_STATES = 1000
"""About how many states of a progress bar are read per block: neighbouring states hardly differ."""
_COLORS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Line(NamedTuple):
    """A line with its number, counted from 1. All states of a progress bar have the same number."""

    number: int
    text: str


def marked_lines(file: BinaryIO, marks: Sequence[bytes]) -> Iterator[Line]:
    """Yield the lines that have any of the marks, without colour codes; decode no other line.

    Args:
        file: a file open in binary mode; its bytes need not be valid UTF-8.
    """
    number, rest, is_whole, size = 1, b"", True, 0
    while block := file.read(_BLOCK_BYTES):
        block = rest + block
        end = block.rfind(b"\n") + 1 or block.rfind(b"\r") + 1
        if not end and len(block) > _LONGEST_BYTES:
            end = len(block)
        yield from _of_block(block[:end], marks, number, is_whole=is_whole)
        size += end
        is_whole = size < _WHOLE_BYTES
        number += block.count(b"\n", 0, end)
        rest = block[end:]
    yield from _of_block(rest, marks, number, is_whole=is_whole)


def _of_block(
    block: bytes, marks: Sequence[bytes], number: int, *, is_whole: bool
) -> Iterator[Line]:
    """Yield the marked lines of a block whose first line has the given number.

    Marks are searched in the whole block, so that Python loops over marked lines only.

    Args:
        is_whole: whether to yield all marked lines instead of a sample.
    """
    spans: dict[int, int] = {}
    for mark in marks:
        lines, place = [], block.find(mark)
        while place >= 0:
            begin, end = block.rfind(b"\n", 0, place) + 1, block.find(b"\n", place)
            end = len(block) if end < 0 else end
            lines.append((begin, end))
            place = block.find(mark, end)
        spans.update(lines[:: 1 if is_whole else max(1, len(lines) // _MOST_LINES)])
    last = 0
    for begin, end in sorted(spans.items()):
        number += block.count(b"\n", last, begin)
        last = begin
        line = block[begin:end].rstrip(b"\r")
        if b"\r" not in line:
            yield Line(number, _plain_text(line))
            continue
        states = line.split(b"\r")
        for state in states[:: max(1, len(states) // _MOST_STATES)]:
            if any(mark in state for mark in marks):
                yield Line(number, _plain_text(state))


def _plain_text(line: bytes) -> str:
    """Return the beginning of a line as text, without a terminal's colour codes."""
    text = line[:_READ_BYTES].decode("utf-8", errors="replace")
    return _COLORS.sub("", text) if "\x1b" in text else text
