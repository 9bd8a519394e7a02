"""Routing of tokens to experts: how unevenly experts, and the ranks that hold them, are loaded."""

import math
from dataclasses import dataclass
from functools import cache

from moetune.domain.errors import InputError

_EXPONENT, _LARGEST = 1.01, 3276.8
"""Of natural routing's power law, and its largest over its smallest load: aiconfigurator's
"power_law_1.01" with 4,096 tokens, of which an expert gets at most 0.8."""
_NUM_PLACEMENTS = 64


def reached(top_k: float, parts: float) -> float:
    """Return the expected parts, of so many ranks or nodes, that a token's experts are on.

    g·(1 − (1 − 1/g)^k), for k experts that are drawn independently
    """
    return parts * (1 - (1 - 1 / parts) ** top_k) if parts > 1 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """Loads of the experts.

    Args:
        name: "balanced", "natural", or a file's name.
        loads: of each expert, in any unit; None for a law that fits every number of experts.

    Raises:
        InputError: a load is negative or no number, or all are 0.
    """

    name: str = "balanced"
    loads: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.loads is None:
            return
        if not all(math.isfinite(load) and load >= 0 for load in self.loads) or not sum(self.loads):
            raise InputError(
                f"routing {self.name}: loads of experts must be numbers from 0 on, not all 0"
            )

    def check(self, num_experts: int) -> None:
        """Raise InputError where the loads are of another number of experts."""
        if self.loads is not None and len(self.loads) != num_experts:
            raise InputError(
                f"routing {self.name} has the loads of {len(self.loads)} experts, and the model "
                f"has {num_experts}",
                "name a file of this model, or use --routing natural",
            )

    def skew(self, num_experts: int, top_k: float, ep: int) -> float:
        """Return the fullest rank's rows over the mean, experts being placed by chance.

        An expert gets each token at most once, and so 1/k of the rows at most.

        The mean over seeded placements; 1 on one rank, which has all experts.
        """
        if self.name == "balanced" or ep == 1:
            return 1.0
        return _skew(self.loads or natural_loads(num_experts), top_k, ep)


BALANCED, NATURAL = ExpertLoads(), ExpertLoads(name="natural")


def natural_loads(num_experts: int) -> tuple[float, ...]:
    """Return the loads of natural routing: the quantiles of a power law.

    x(u) = (1 + u·(L^(1−a) − 1))^(1/(1−a)), from 1 to L with exponent a
    """
    power = 1 - _EXPONENT
    return tuple(
        (1 + (index + 0.5) / num_experts * (_LARGEST**power - 1)) ** (1 / power)
        for index in range(num_experts)
    )


def _capped(loads: tuple[float, ...], most: float) -> list[float]:
    """Return shares of all rows; those above `most` are cut, and the others grow in proportion."""
    tiny = max(loads) * 1e-12  # of experts without any load, when all others are full
    total = sum(loads) + len(loads) * tiny
    shares = [(load + tiny) / total for load in loads]
    while max(shares) > most * (1 + 1e-9):
        full = [share >= most for share in shares]
        rest = sum(share for share, is_full in zip(shares, full, strict=True) if not is_full)
        left = (1 - most * sum(full)) / rest
        shares = [
            most if is_full else share * left for share, is_full in zip(shares, full, strict=True)
        ]
    return shares


@cache
def _skew(loads: tuple[float, ...], top_k: float, ep: int) -> float:
    import numpy as np  # loads in a tenth of a second, which balanced routing does not need

    drawn, shares = np.random.default_rng(0), np.array(_capped(loads, 1 / top_k))
    fullest = [
        float(drawn.permutation(shares).reshape(ep, -1).sum(axis=1).max())
        for _ in range(_NUM_PLACEMENTS)
    ]
    return sum(fullest) / _NUM_PLACEMENTS * ep
