"""Seconds of a block's modules for one micro-batch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moetune.solve.training.modules import COMMUNICATION, ModuleName


class Passes(NamedTuple):
    """Seconds of a module's passes; sums are of each pass."""

    forward: float = 0.0
    grad_input: float = 0.0
    grad_weight: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":  # type: ignore[override]  # of passes, not of tuples
        return Passes(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.grad_input + self.grad_weight


NO_TIME = Passes()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Seconds of a block's modules, or of some of them, for one micro-batch.

    Args:
        compute, communication: all of each, summed up once: a search asks them for every layout.
    """

    modules: Mapping[ModuleName, Passes]
    compute: Passes
    communication: Passes

    @classmethod
    def of(cls, modules: Iterable[tuple[ModuleName, Passes]]) -> "BlockTimes":
        """Return the times of modules, those of the same name as one."""
        found: dict[ModuleName, Passes] = {}
        compute = communication = NO_TIME
        for name, passes in modules:
            found[name] = found[name] + passes if name in found else passes
            if name in COMMUNICATION:
                communication += passes
            else:
                compute += passes
        return cls(modules=found, compute=compute, communication=communication)

    def __add__(self, other: "BlockTimes") -> "BlockTimes":
        modules = {**self.modules}
        for name, passes in other.modules.items():
            modules[name] = modules[name] + passes if name in modules else passes
        return BlockTimes(
            modules=modules,
            compute=self.compute + other.compute,
            communication=self.communication + other.communication,
        )

    def passes(self, name: ModuleName) -> Passes:
        """Return a module's passes, zero where the block has none."""
        return self.modules.get(name, NO_TIME)
