"""How operations that run at once slow each other down: a speed of each class beside the others."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moetune.domain.errors import InputError
from moetune.domain.samples import ResourceClass


class _Speeds:
    """Speeds of one class of operations beside the others, each above 0 and at most 1."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            speed = getattr(self, name)
            is_array = hasattr(speed, "shape")  # without importing NumPy; those are never input
            if not is_array and not 0 < speed <= 1:
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


class OverlapSpeeds(NamedTuple):
    """Speeds of computation and communication while both run, 1.0 = undisturbed."""

    comp: float
    comm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Speed of each class while others run (MPipeMoE §II-C, Fig. 3); of many refits, arrays."""

    comp: CompSpeed = field(default_factory=CompSpeed)
    comm: CommSpeed = field(default_factory=CommSpeed)
    mem: MemSpeed = field(default_factory=MemSpeed)

    def speed(self, victim: ResourceClass, running: frozenset[ResourceClass]) -> float:
        """Return the victim's speed while the classes in `running` run (itself ignored)."""
        rivals = running - {victim}
        if not rivals:
            return 1.0
        key = "all" if len(rivals) > 1 else next(iter(rivals))
        speed: float = getattr(getattr(self, victim), key)
        return speed

    @property
    def overlap_speeds(self) -> OverlapSpeeds:
        """Speeds of computation and communication beside each other."""
        return OverlapSpeeds(comp=self.comp.comm, comm=self.comm.comp)

    def overlapped(self, speeds: OverlapSpeeds) -> "Interference":
        """Return the table with these speeds of computation and communication beside each other."""
        comp, comm = replace(self.comp, comm=speeds.comp), replace(self.comm, comp=speeds.comm)
        return replace(self, comp=comp, comm=comm)

    @property
    def is_none(self) -> bool:
        """Whether no class slows another one down."""
        return self == Interference()
