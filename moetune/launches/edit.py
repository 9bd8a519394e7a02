"""A copy of a script in which some arguments have other values, and nothing else is touched."""

import re
from collections.abc import Mapping

from moetune.domain.errors import InputError
from moetune.launches.reading import Given

_VALUE = r"(?:[ \t]+(?!--|\\|\)|#)(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s'\"\\)]+))"


def edited(text: str, given: Mapping[str, Given], changes: Mapping[str, str]) -> str:
    """Return the script with arguments changed in their lines.

    Args:
        given: the script's arguments, by key.
        changes: arguments by key, with their values; "" to leave one out.

    Raises:
        InputError: an argument stands in no line of the file, or not as it is written.
    """
    lines = text.splitlines(keepends=True)
    added = []
    for key, argument in changes.items():
        if key not in given:
            added.append(argument)
            continue
        place = given[key]
        line = lines[place.line - 1] if place.line else ""
        plain = argument.replace("\\", r"\\")
        changed, count = re.subn(_of(place.written), plain, line, count=1)
        if not count:
            where = f"line {place.line}" if place.line else "the words behind --"
            raise InputError(
                f"{place.written} cannot be changed in {where}", f"write it by hand: {argument}"
            )
        lines[place.line - 1] = changed
    if added:
        flags = (place for place in given.values() if place.written.startswith("--"))
        anchor = next((place for place in flags if place.line), None)
        if anchor is None:
            raise InputError("no line of the file has an argument", "add them by hand")
        line = lines[anchor.line - 1]
        lines[anchor.line - 1] = re.sub(
            re.escape(anchor.written) + r"(?![\w-])",
            lambda match: f"{' '.join(added)} {match[0]}", line, count=1,
        )  # fmt: skip
    return "".join(lines)


def _of(written: str) -> str:
    """Return the pattern of an argument with its values in a line."""
    return rf"{re.escape(written)}(?![\w-])(?:=\S+|{_VALUE}*)"
