"""Constraints as texts by flag name, as plan files carry them in `inputs.constraints`.

Flags, JSON and forms all become such a mapping, which `decode_constraints` reads and
`encode_constraints` writes.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from moetune.domain.constraints import STRATEGIES, Bounds, Constraints, Order
from moetune.domain.document import shown
from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel
from moetune.domain.placement import PlacementRule
from moetune.domain.routing import LayerRouting
from moetune.domain.spelling import AS_KEYS, Spelling, check_range, nearest_or

EXPERT_PARALLEL = "expert-parallel"
SEQUENCE_PARALLEL = "sequence-parallel"
MEMORY_TAKEN = "memory-taken"
ALLOW_MODELLED = "allow-modelled"
ROUTING = "routing"
EXPERT_PLACEMENT = "expert-placement"
_Part = Literal["bounds", ""]
_PLACES: Mapping[str, tuple[_Part, str]] = MappingProxyType(
    {
        "forward-degree": ("bounds", "forward_degree"),
        "backward-degree": ("bounds", "backward_degree"),
        "max-degree": ("bounds", "max_degree"),
        "min-chunk-tokens": ("bounds", "min_chunk_tokens"),
        "order": ("bounds", "order"),
        "strategy": ("bounds", "strategy"),
        EXPERT_PARALLEL: ("", "expert_parallel"),
        SEQUENCE_PARALLEL: ("", "sequence_parallel"),
        MEMORY_TAKEN: ("", "memory_taken_bytes"),
        ALLOW_MODELLED: ("", "allow_modelled"),
        ROUTING: ("", "routing"),
        EXPERT_PLACEMENT: ("", "expert_placement"),
    }
)
"""Where each flag's value lies in `Constraints`: the part, and its field."""
_NUMBERS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "forward-degree": (1, 256), "backward-degree": (1, 256), "max-degree": (1, 256),
        "min-chunk-tokens": (1, 2**31), MEMORY_TAKEN: (0, 2**50),
    }
)  # fmt: skip
"""Smallest and largest value of the flags with a number."""
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "order": get_args(Order),
        "strategy": STRATEGIES,
        EXPERT_PARALLEL: get_args(ExpertParallel),
        EXPERT_PLACEMENT: get_args(PlacementRule),
    }
)
_MOST_DIGITS = 18


def encode_constraints(constraints: Constraints) -> dict[str, str]:
    """Return what differs from the defaults, as texts by flag name."""
    default = dict(_values(Constraints()))
    return {flag: _text(value) for flag, value in _values(constraints) if value != default[flag]}


def decode_constraints(texts: Mapping[str, str], spelling: Spelling = AS_KEYS) -> Constraints:
    """Return the constraints in texts by flag name.

    Raises:
        InputError: a name is unknown, or a value wrong; the text names it.
    """
    parts: dict[str, dict[str, Any]] = {part: {} for part in ("bounds", "")}
    for flag, text in texts.items():
        if flag not in _PLACES:
            raise _unknown(flag, spelling)
        part, name = _PLACES[flag]
        parts[part][name] = _value(flag, text, spelling)
    return Constraints(bounds=Bounds(**parts["bounds"]), **parts[""])


def recorded_constraints(texts: Mapping[str, str]) -> Constraints:
    """Return the constraints of a plan file, without those of a newer moetune."""
    return decode_constraints({flag: text for flag, text in texts.items() if flag in _PLACES})


def check_constraint_sizes(constraints: Constraints, spelling: Spelling = AS_KEYS) -> None:
    """Raise InputError where a number is so large that it is a mistake."""
    for flag, value in _values(constraints):
        limits = _NUMBERS.get(flag)
        if limits is not None and value is not None:
            check_range(spelling(flag), value, *limits)


def _values(constraints: Constraints) -> Iterator[tuple[str, Any]]:
    for flag, (part, name) in _PLACES.items():
        yield flag, getattr(getattr(constraints, part) if part else constraints, name)


def constraint_words(flag: str, text: str) -> str:
    """Return a constraint's value for readers: of recorded loads only how many there are."""
    if flag != ROUTING:
        return text
    loads = LayerRouting.of(text).loads
    return loads.name if loads.loads is None else f"loads of {len(loads.loads)} experts"


def _unknown(flag: str, spelling: Spelling) -> InputError:
    hint = nearest_or(f"known: {', '.join(sorted(_PLACES))}", flag, _PLACES)
    return InputError(f"{spelling.constraint.format(shown(flag))} is unknown", hint)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(flag: str, text: str, spelling: Spelling) -> int | bool | str:
    if flag == ROUTING:
        return str(LayerRouting.of(text))
    if flag in _CHOICES:
        if text not in _CHOICES[flag]:
            known = ", ".join(_CHOICES[flag])
            raise InputError(f"{spelling(flag)} must be one of {known}, got {shown(text)}")
        return text
    if flag not in _NUMBERS:
        if text not in {"true", "false"}:
            raise InputError(f'{spelling(flag)} must be "true" or "false", got {shown(text)}')
        return text == "true"
    smallest, largest = _NUMBERS[flag]
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    if not is_number or int(text) < smallest:
        raise InputError(
            f"{spelling(flag)} must be a whole number from {smallest} to {largest}, as a text, "
            f"got {shown(text)}"
        )
    return int(text)
