"""Spellings of a request's keys: flags, keys of JSON, fields of a form, as errors name them."""

from collections.abc import Mapping
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
    """How a caller writes a request's keys, so that errors name them alike.

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


def check_range(name: str, value: int, smallest: int, largest: int) -> None:
    """Raise InputError unless the value is in the range: huge ones would take long to reject."""
    if not smallest <= value <= largest:
        raise InputError(f"{name} must be from {smallest} to {largest}, got {value}")
