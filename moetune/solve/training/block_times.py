"""Seconds of a block's modules for one micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moetune.solve.training.modules import COMMUNICATION, ModuleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Seconds of a module's passes."""

    forward: float = 0.0
    grad_input: float = 0.0
    grad_weight: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            forward=self.forward + other.forward,
            grad_input=self.grad_input + other.grad_input,
            grad_weight=self.grad_weight + other.grad_weight,
        )

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.grad_input + self.grad_weight


NO_TIME = Passes()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Seconds of a block's modules for one micro-batch.

    Args:
        compute, communication: all of each, summed up once: a search asks them for every layout.
    """

    modules: Mapping[ModuleName, Passes]
    compute: Passes = field(init=False)
    communication: Passes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", self._sum(is_communication=False))
        object.__setattr__(self, "communication", self._sum(is_communication=True))

    def passes(self, name: ModuleName) -> Passes:
        """Return a module's passes, zero where the block has none."""
        return self.modules.get(name, NO_TIME)

    def _sum(self, *, is_communication: bool) -> Passes:
        total = NO_TIME
        for name, passes in self.modules.items():
            if (name in COMMUNICATION) == is_communication:
                total += passes
        return total
