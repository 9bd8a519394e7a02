"""Names of a question's fields in errors, and the known name nearest to a wrong name.

Errors name a field by its flag, such as `--memory-limit`, and carry the field as data. Only
`spelled` replaces the flags by a surface's names: keys of JSON, arguments, labels.
"""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from moetune.domain.errors import MoetuneError

_COMMAND_OR_FLAG = re.compile(r"(`[^`]*`|\b(?:moetune|torchrun) \S.*)|--([a-z][a-z-]*)( (?=\d))?")

_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model", "world-size": "world_size", "tokens": "tokens_per_rank",
        "memory-limit": "memory_limit_bytes", "dtype": "dtype",
        "profile": "profile", "d-model": "layer.d_model", "d-hidden": "layer.d_hidden",
        "num-experts": "layer.num_experts", "top-k": "layer.top_k",
    }
)  # fmt: skip
"""Keys of a plan's inputs by flag; every other flag is a constraint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """Names that a surface gives the fields of a question.

    Args:
        key, constraint: templates with `{}` for the key of an input and for a constraint's flag.
    """

    key: str = "{}"
    constraint: str = "{}"
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __call__(self, name: str) -> str:
        """Return the surface's name of a plan's input, or of a constraint's flag."""
        template = self.key if name in _KEYS.values() else self.constraint
        return self.names.get(name) or template.format(name)

    def of_flag(self, flag: str) -> str:
        """Return the name of the field of a flag, which is given without dashes."""
        return self(_KEYS.get(flag, flag))


AS_FLAGS = Spelling(
    key="--{}", constraint="--{}", names={key: f"--{flag}" for flag, key in _KEYS.items()}
)
AS_FIELDS = Spelling()
AS_KEYS = Spelling(key="inputs.{}", constraint="inputs.constraints.{}")


class Arguments(Spelling):
    """Names of a program's arguments: names of flags with underscores."""

    def of_flag(self, flag: str) -> str:
        """Return the argument of a flag: "memory_limit" of "memory-limit"."""
        return flag.replace("-", "_")


AS_ARGUMENTS = Arguments()


def flag_of(field: str) -> str:
    """Return the flag of a field: `--memory-limit` of `memory_limit`."""
    return f"--{field.replace('_', '-')}"


@contextmanager
def about(field: str) -> Iterator[None]:
    """Attach a field to errors inside; their text then begins with its flag, unless it has it."""
    try:
        yield
    except MoetuneError as error:
        if not error.field:
            flag, error.field = flag_of(field), field
            if flag not in error.what:
                error.what = f"{flag}: {error.what}"
                error.args = error.what, error.hint
        raise


@contextmanager
def spelled(spelling: Spelling) -> Iterator[None]:
    """Rename fields in errors inside as a surface spells them, except in commands to paste.

    A number after an identifier is its value: "--tp 8" becomes "tp=8".
    """

    def name_of(match: re.Match[str]) -> str:
        if match[2] is None:
            return match[0]
        name, space = spelling.of_flag(match[2]), match[3] or ""
        return f"{name}=" if space and name.isidentifier() else name + space

    try:
        yield
    except MoetuneError as error:
        error.what, error.hint = (
            _COMMAND_OR_FLAG.sub(name_of, text) for text in (error.what, error.hint)
        )
        error.args = error.what, error.hint
        raise


def nearest_or(otherwise: str, name: object, names: Iterable[str]) -> str:
    """Return the hint "did you mean 'degree'?" if a known name is near, else `otherwise`."""
    near = _nearest_name(name, names)
    return f"did you mean {near!r}?" if near else otherwise


def nearest_then(hint: str, name: object, names: Iterable[str]) -> str:
    """Return the hint, after "did you mean gpt-xl? " if a known name is near."""
    near = _nearest_name(name, names)
    return f"did you mean {near}? {hint}" if near else hint


def _nearest_name(name: object, names: Iterable[str]) -> str:
    """Return the known name with the most similar spelling; "" if none is similar.

    An equal first word counts more: "a100-80gb-x8" is nearer to a100-x8 than to h100-96gb-x8.
    """
    near, first = difflib.get_close_matches(str(name), names), str(name).lower().split("-")[0]
    return next((name for name in near if name.split("-")[0] == first), (*near, "")[0])
