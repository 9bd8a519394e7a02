"""How a question asks for each of its fields: words, choices, and the range of the value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from moetune.domain.document import shown
from moetune.domain.errors import InputError
from moetune.domain.spelling import about, flag_of
from moetune.domain.units import parse_count

LARGEST_RANKS = 2**20
LARGEST_TOKENS = 2**31
LARGEST_BYTES = 2**50
LARGEST_WIDTH = 2**20
"""The largest width of a layer, and the largest number of its experts."""
LARGEST_DEGREE = 256
Scope = Literal["any", "layer", "model"]
"""Plans that a field is for: all, those of a layer alone, or those of a whole model."""
_YES, _NO = ("yes", "true"), ("no", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Fields that stand together in help and in forms."""

    title: str
    scope: Scope = "any"


PLANNED = Group(title="What is planned, and where")
SIZES = Group(title="Sizes, in place of a model's name")
TRAINING = Group(title="Training of a whole model", scope="model")
PINS = Group(title="Pin the layout of a whole model", scope="model")
LAYER = Group(title="A layer alone", scope="layer")
GROUPS = (PLANNED, SIZES, TRAINING, PINS, LAYER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One field of the question.

    Args:
        kind: type of the value: int, float, bool or str.
        parse: reads the value from a text; where `kind` is str, only checks the text.
        form: how help shows the flag's value; "" to show the choices.
        choices: allowed values, or only suggestions where `is_choice` is False.
        smallest, largest: bounds of a number; `largest` is None for no upper bound.
        is_switch: whether the flag takes no value and means yes.
    """

    name: str
    kind: type
    group: Group
    label: str
    words: str
    parse: Callable[[str], Any]
    form: str = ""
    choices: tuple[Any, ...] = ()
    is_choice: bool
    smallest: float = 1
    largest: int | None = None
    is_switch: bool

    @property
    def flag(self) -> str:
        """Its flag, such as `--memory-limit`."""
        return flag_of(self.name)

    def read(self, text: str) -> object:
        """Return the value of a text; raises InputError about the field for a wrong text."""
        with about(self.name):
            if self.is_choice:
                by_text = {str(choice): choice for choice in self.choices}
                if text not in by_text:
                    self._refuse(text)
                return by_text[text]
            if self.kind is bool:
                if text not in (*_YES, *_NO):
                    raise InputError(f"{self.flag} must be yes or no, got {shown(text)}")
                return text in _YES
            value = self.parse(text)
            return text if self.kind is str else value

    def check(self, value: Any) -> None:  # noqa: ANN401 - of any kind
        """Raise InputError if a number is out of range or a value is not among the choices."""
        if self.is_choice:
            if value not in self.choices:
                self._refuse(value)
        elif self.kind in (int, float) and not (
            value >= self.smallest and (self.largest is None or value <= self.largest)
        ):
            least = f"at least {self.smallest}"
            if self.largest is not None:
                least = f"from {self.smallest} to {self.largest}"
            raise InputError(f"{self.flag} must be {least}, got {shown(value)}", field=self.name)

    def _refuse(self, value: object) -> NoReturn:
        what = f"{self.flag} must be one of {', '.join(map(str, self.choices))}"
        raise InputError(f"{what}, got {shown(value)}", field=self.name)


def described(
    group: Group, label: str, words: str, *, default: object = None, **more: object
) -> Any:  # noqa: ANN401 - as of dataclasses.field
    """Return a dataclass field with all attributes of an `Ask` except its name and kind."""
    metadata = {"group": group, "label": label, "words": words, **more}
    return field(default=default, metadata=metadata)


def asks_of(kind: type) -> Mapping[str, Ask]:
    """Return an `Ask` for each described field of a dataclass, in the fields' order."""
    hints = get_type_hints(kind)
    return MappingProxyType(
        {
            item.name: _ask_of(item.name, hints[item.name], item.default, item.metadata)
            for item in fields(kind) if item.metadata
        }
    )  # fmt: skip


def _ask_of(name: str, hint: object, default: object, metadata: Mapping[str, Any]) -> Ask:
    plain = next(part for part in (*get_args(hint), hint) if part is not type(None))
    is_choice = get_origin(plain) is Literal
    kind: Any = type(get_args(plain)[0]) if is_choice else plain
    count = partial(parse_count, least=metadata.get("smallest", 1))
    more = {"parse": {int: count, float: _number}.get(kind, str), **metadata}
    if is_choice:
        more["choices"] = get_args(plain)
    return Ask(name=name, kind=kind, is_choice=is_choice, is_switch=default is False, **more)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{shown(text)} is no number", "such as 0.5") from None
