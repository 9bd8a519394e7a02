"""How operations that run at once slow each other down: a speed of each class in overlap."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from moetune.domain.errors import InputError

if TYPE_CHECKING:  # it loads NumPy
    from moetune.domain.arrays import Floats


class _Speeds:
    """Speeds of a class of operations in overlap with others, each above 0 and at most 1."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            speed = getattr(self, name)
            if not 0 < speed <= 1:
                raise InputError(f"{name} must be a speed above 0 and at most 1, got {speed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompSpeed(_Speeds):
    """Speed of computation while the others run, 1.0 = undisturbed."""

    comm: float = 1.0
    mem: float = 1.0
    all: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSpeed(_Speeds):
    """Speed of communication while the others run, 1.0 = undisturbed."""

    comp: float = 1.0
    mem: float = 1.0
    all: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemSpeed(_Speeds):
    """Speed of host/device copies while the others run, 1.0 = undisturbed."""

    comp: float = 1.0
    comm: float = 1.0
    all: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Speed of each class while others run (MPipeMoE §II-C, Fig. 3)."""

    comp: CompSpeed = field(default_factory=CompSpeed)
    comm: CommSpeed = field(default_factory=CommSpeed)
    mem: MemSpeed = field(default_factory=MemSpeed)

    @property
    def is_none(self) -> bool:
        """Whether no class slows another class down."""
        return self == Interference()


SpeedTable = Mapping[tuple[str, str], "Floats"]
"""Speed by a class and what runs meanwhile: another class, or "all" others. The arrays have no
dimensions, or an entry for each of several refits."""


class OverlapSpeeds(NamedTuple):
    """Speeds of computation and communication while both run, 1.0 = undisturbed: arrays."""

    comp: "Floats"
    comm: "Floats"
