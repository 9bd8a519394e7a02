"""Settings that relate values of a plan to keys of a runtime, for both writing and reading them.

Reading the keys that a table wrote gives back the values of the plan.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from moetune.export.planned import Planned

Value: TypeAlias = (
    int
    | float
    | bool
    | str
    | tuple[str, ...]
    | tuple[int, ...]
    | tuple[tuple[str, ...], ...]
    | None
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value of a plan, and the runtime's keys that express it.

    Args:
        name: an attribute of `FoldedLayout` or `TrainingJob`, a fact of `Target`, or another name.
        keys: the runtime's keys, each with its default.
        write: returns the keys' values in their order; None for a key that is left out.
        read: takes the keys' values in their order, and returns the plan's value.
    """

    name: str
    keys: Mapping[str, Value]
    write: Callable[[Planned], tuple[Value, ...]]
    read: Callable[..., object]

    def of(self, values: Mapping[str, Value]) -> object:
        """Return the plan's value for the given keys; missing keys have their defaults."""
        return self.read(*(values.get(key, default) for key, default in self.keys.items()))


def size(name: str, key: str, default: Value = 1) -> Setting:
    """Return the setting of a number, such as a size of the layout, with a single key."""
    return Setting(
        name=name, keys={key: default}, write=lambda planned: (_number(planned, name),),
        read=lambda value: value,
    )  # fmt: skip


def switch(name: str, key: str, writes: Callable[[Planned], bool], *, default: bool) -> Setting:
    """Return the setting of a Boolean with a single key."""
    return Setting(
        name=name, keys={key: default}, write=lambda planned: (writes(planned),), read=bool
    )


def _number(planned: Planned, name: str) -> int:
    source: Any = planned.job if hasattr(planned.job, name) else planned.layout
    number: int = getattr(source, name)
    return number


def write_keys(settings: Iterable[Setting], planned: Planned) -> dict[str, Value]:
    """Return the keys that express a plan, with their values; keys without a value are left out."""
    pairs = (
        pair for setting in settings
        for pair in zip(setting.keys, setting.write(planned), strict=True)
    )  # fmt: skip
    return {key: value for key, value in pairs if value is not None}


def read_settings(settings: Iterable[Setting], values: Mapping[str, Value]) -> dict[str, Any]:
    """Return the plan's values that the keys express, by the settings' names."""
    return {setting.name: setting.of(values) for setting in settings}


def names_of(settings: Iterable[Setting]) -> tuple[str, ...]:
    """Return the keys of all settings."""
    return tuple(key for setting in settings for key in setting.keys)


def keys_of(settings: Iterable[Setting], name: str) -> tuple[str, ...]:
    """Return the keys of the setting with this name; () if there is none."""
    return next((tuple(setting.keys) for setting in settings if setting.name == name), ())
