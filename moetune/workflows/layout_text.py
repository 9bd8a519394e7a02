"""Layouts that a caller writes: "tp=2,pp=4", or as plans print them, "dp 8 · tp 2 · pp 4"."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moetune.domain.document import shown
from moetune.domain.errors import InputError
from moetune.domain.spelling import nearest_or

_PRINTED = "·"
_MOST_LETTERS = 300
_SHARE = re.compile(r"[0-9]{0,3}\.?[0-9]{1,6}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutText:
    """The sizes and words of a layout as texts, by name.

    Args:
        is_whole: whether it is written as plans print it, where a size that is omitted is 1.
    """

    values: Mapping[str, str]
    is_whole: bool


def read_layout(
    text: str, *, flag: str, numbers: Sequence[str], words: Mapping[str, Sequence[str]],
    lists: Sequence[str] = (), shares: Sequence[str] = (),
) -> LayoutText:  # fmt: skip
    """Return the layout in a text.

    Args:
        flag: that the text is the value of, for errors.
        numbers: names of sizes.
        words: values by name; a printed layout has the value alone, such as "tensor".
        lists: names of `words` that have several values: "recompute=moe_act,norm".
        shares: names of numbers from 0 to 1.

    Raises:
        InputError: a name is unknown or given twice, or a value is none that it could have.
    """
    known = (*numbers, *shares, *words)
    if not text.strip() or len(text) > _MOST_LETTERS:
        raise InputError(f"{flag} is empty or too long", _known(known))
    found: dict[str, str] = {}
    for name, value in _pairs(text, flag, words):
        if name not in known:
            hint = nearest_or(_known(known), name, known)
            raise InputError(f"{flag} has the unknown size {shown(name)}", hint)
        if name in found and name not in lists:
            raise InputError(f"{flag} names {name} twice", "name it once")
        if name in shares:
            _check_share(value, name, flag)
        else:
            _check(value, name, flag, words)
        found[name] = f"{found[name]},{value}" if name in found else value
    return LayoutText(values=found, is_whole=_PRINTED in text)


def _pairs(text: str, flag: str, words: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    for part in map(str.strip, text.replace(_PRINTED, ",").split(",")):
        alone = [name for name, values in words.items() if part in values]
        if alone:
            yield alone[0], part
            continue
        name, _, value = part.replace("=", " ", 1).partition(" ")
        if not name or not value.strip():
            raise InputError(f"{flag}: {shown(part)} is not NAME=VALUE", "such as tp=2,pp=4")
        yield name.replace("_", "-"), value.strip()


def _check(value: str, name: str, flag: str, words: Mapping[str, Sequence[str]]) -> None:
    if name in words:
        if value not in words[name]:
            known = ", ".join(words[name])
            raise InputError(f"{flag}: {name} must be one of {known}, got {shown(value)}")
    elif not (value.isascii() and value.isdigit() and int(value) and len(value) < 10):  # noqa: PLR2004 - digits
        raise InputError(f"{flag}: {name} must be a whole number from 1, got {shown(value)}")


def _check_share(value: str, name: str, flag: str) -> None:
    if not _SHARE.fullmatch(value) or not 0 <= float(value) <= 1:
        raise InputError(f"{flag}: {name} must be from 0 to 1, got {shown(value)}")


def _known(names: Sequence[str]) -> str:
    return f"write sizes as tp=2,pp=4; known: {', '.join(names)}"
