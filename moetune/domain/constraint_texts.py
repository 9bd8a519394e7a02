"""Constraints as texts by flag name, as plan files carry them in `inputs.constraints`.

Flags, JSON and forms all become such a mapping, which `decode_constraints` reads and
`encode_constraints` writes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from moetune.domain.ask import Ask
from moetune.domain.constraints import Bounds, Constraints
from moetune.domain.document import shown
from moetune.domain.errors import InputError
from moetune.domain.question import ASKS
from moetune.domain.routing import LayerRouting
from moetune.domain.spelling import nearest_or

ALLOW_MODELLED = "allow-modelled"
ROUTING = "routing"
CONSTRAINTS = (
    "forward-degree", "backward-degree", "max-degree", "min-chunk-tokens", "order", "strategy",
    "expert-parallel", "sequence-parallel", "memory-taken", ALLOW_MODELLED, ROUTING,
    "expert-placement",
)  # fmt: skip
"""Flags of the question that a plan's inputs record as texts."""
_IN_BOUNDS = frozenset(item.name for item in fields(Bounds))
_MOST_DIGITS = 18


def encode_constraints(constraints: Constraints) -> dict[str, str]:
    """Return what differs from the defaults, as texts by flag name."""
    default = dict(_values(Constraints()))
    return {flag: _text(value) for flag, value in _values(constraints) if value != default[flag]}


def decode_constraints(texts: Mapping[str, str]) -> Constraints:
    """Return the constraints in texts by flag name.

    Raises:
        InputError: a name is unknown, or a value wrong; the text names it.
    """
    for flag in texts:
        if flag not in CONSTRAINTS:
            hint = nearest_or(f"known: {', '.join(sorted(CONSTRAINTS))}", flag, CONSTRAINTS)
            raise InputError(f"the constraint {shown(flag)} is unknown", hint)
    found = {_name(flag): _value(flag, text) for flag, text in texts.items()}
    bounds = {name: found.pop(name) for name in _IN_BOUNDS & found.keys()}
    return Constraints(bounds=Bounds(**bounds), **found)


def recorded_constraints(texts: Mapping[str, str]) -> Constraints:
    """Return the constraints of a plan file, without those of a newer moetune."""
    return decode_constraints({flag: text for flag, text in texts.items() if flag in CONSTRAINTS})


def check_constraint_sizes(constraints: Constraints) -> None:
    """Raise InputError where a number is so large that it is a mistake."""
    for flag, value in _values(constraints):
        if value is not None and flag != ROUTING:
            _ask(flag).check(value)


def _values(constraints: Constraints) -> Iterator[tuple[str, Any]]:
    for flag in CONSTRAINTS:
        name = _name(flag)
        yield flag, getattr(constraints.bounds if name in _IN_BOUNDS else constraints, name)


def _name(flag: str) -> str:
    """Return the field of `Constraints`, or of its bounds, that has a flag's value."""
    return "memory_taken_bytes" if flag == "memory-taken" else flag.replace("-", "_")


def constraint_words(flag: str, text: str) -> str:
    """Return a constraint's value for readers: of recorded loads only how many there are."""
    if flag != ROUTING:
        return text
    loads = LayerRouting.of(text).loads
    return loads.name if loads.loads is None else f"loads of {len(loads.loads)} experts"


def _ask(flag: str) -> Ask:
    return ASKS[flag.replace("-", "_")]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(flag: str, text: str) -> Any:  # noqa: ANN401 - of any kind
    """Return the value in a text; numbers are of bytes or tokens, without a unit."""
    ask = _ask(flag)
    if flag == ROUTING:
        return str(LayerRouting.of(text))
    if ask.kind is not int:
        return ask.read(text)
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise InputError(f"--{flag} must be a whole number, as a text, got {shown(text)}")
    number = int(text)
    if number < ask.smallest:  # a plan of before may have more than is taken now
        ask.check(number)
    return number
