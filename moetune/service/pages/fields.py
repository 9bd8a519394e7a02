"""Fields of the pages' forms, which one macro draws, and the field that an error names."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from moetune.domain.errors import MoetuneError


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a form.

    Args:
        name: in an address.
        hint: such as a unit.
        flag: of a command that means the same; "" for none.
        placeholder: what an empty field stands for.
        choices: of a list, after one of nothing; none for a text.
        suggested: texts to complete, with words on each.
    """

    name: str
    label: str
    hint: str = ""
    flag: str = ""
    placeholder: str = ""
    choices: tuple[str, ...] = ()
    suggested: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    is_required: bool = False


def field_of(problem: MoetuneError, filled: Collection[str], known: Collection[str]) -> str:
    """Return the field that an error names: a filled one, else the first flag; "" for none."""
    words = re.findall(r"-*[a-z][a-z_-]*", problem.what)
    names = [(word.strip("-").replace("-", "_"), word.startswith("--")) for word in words]
    mine = (name for name, _ in names if name in filled)
    flags = (name for name, is_flag in names if is_flag and name in known)
    return next(mine, None) or next(flags, "")
