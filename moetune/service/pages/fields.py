"""Fields of the pages' forms, which one macro draws."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


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
