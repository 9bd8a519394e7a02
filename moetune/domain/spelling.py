"""Spellings of a request's keys, as errors name them, and the name that a wrong one is nearest to.

Keys are flags, keys of JSON, or fields of a form.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from moetune.domain.errors import InputError

_INPUTS = frozenset(
    {
        "model", "layer", "world_size", "tokens_per_rank", "dtype", "memory_limit_bytes",
        "profile", "profile_fingerprint",
    }
)  # fmt: skip
"""Inputs of a plan; every other name is a constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """A caller's names of a request's keys, for errors.

    Args:
        key, constraint: templates with `{}` for the name of an input and of a constraint.
        names: names that are written otherwise.
    """

    key: str
    constraint: str
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __call__(self, name: str) -> str:
        """Return an input's or a constraint's name as the caller writes it."""
        template = self.key if name.partition(".")[0] in _INPUTS else self.constraint
        return self.names.get(name) or template.format(name)


AS_FLAGS = Spelling(
    key="--{}",
    constraint="--{}",
    names=MappingProxyType(
        {
            "layer": "--d-model, --d-hidden and --num-experts",
            "layer.d_model": "--d-model",
            "layer.d_hidden": "--d-hidden",
            "layer.num_experts": "--num-experts",
            "layer.top_k": "--top-k",
            "world_size": "--world-size",
            "num_nodes": "--nodes",
            "tokens_per_rank": "--tokens",
            "memory_limit_bytes": "--memory-limit",
        }
    ),
)
AS_KEYS = Spelling(key="inputs.{}", constraint="inputs.constraints.{}")
AS_FIELDS = Spelling(key="{}", constraint="{}")


def nearest_or(otherwise: str, name: object, known: Iterable[str]) -> str:
    """Return the hint "did you mean 'degree'?" for an unknown key, else the other hint."""
    near = _nearest(name, known)
    return f"did you mean {near!r}?" if near else otherwise


def nearest_then(hint: str, name: object, known: Iterable[str]) -> str:
    """Return the hint, behind "did you mean gpt-xl? " where the name of a known thing is near."""
    near = _nearest(name, known)
    return f"did you mean {near}? {hint}" if near else hint


def _nearest(name: object, known: Iterable[str]) -> str:
    """Return the known name that is spelled most like it; "" where none is."""
    return next(iter(difflib.get_close_matches(str(name), known, n=1)), "")


def check_range(name: str, value: int, smallest: int, largest: int) -> None:
    """Raise InputError unless the value is in the range: huge ones would take long to reject."""
    if not smallest <= value <= largest:
        raise InputError(f"{name} must be from {smallest} to {largest}, got {value}")
