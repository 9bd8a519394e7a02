"""Routing of tokens to experts: how unevenly experts, and the ranks that hold them, are loaded."""

import math
from dataclasses import dataclass
from functools import cache, lru_cache

from moetune.domain.errors import InputError

_EXPONENT, _LARGEST = 1.01, 3276.8
"""Exponent of natural routing's power law, and ratio of its largest to its smallest load. They are
aiconfigurator's "power_law_1.01" with 4,096 tokens, of which an expert gets at most 0.8."""
_NUM_PLACEMENTS = 64


def reached(top_k: float, parts: float) -> float:
    """Return the expected number of parts (ranks or nodes) that a token's experts are on.

    g·(1 − (1 − 1/g)^k), for k experts that are drawn independently
    """
    return parts * (1 - (1 - 1 / parts) ** top_k) if parts > 1 else 1.0


def reached_ranks(top_k: int, num_experts: int, ranks: int) -> float:
    """Return the expected number of ranks that a token's experts are on.

    P·(1 − C(E − E/P, k) / C(E, k)), for k of E experts that are equally likely, E/P on each rank.
    """
    elsewhere = num_experts - num_experts // ranks
    none = math.prod((elsewhere - drawn) / (num_experts - drawn) for drawn in range(top_k))
    return ranks * (1 - none)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """Loads of the experts; raises InputError for a negative or infinite load, or all 0.

    Args:
        name: "balanced", "natural", or a file's name.
        loads: load of each expert, in any unit; None for a law for every number of experts.
    """

    name: str = "balanced"
    loads: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.loads is None:
            return
        if not self.loads:
            raise InputError(f"routing {self.name} is empty", "give one load for each expert")
        wrong = [
            f"the load of expert {expert} is {load:g}"
            for expert, load in enumerate(self.loads)
            if not math.isfinite(load) or load < 0
        ]
        if wrong or not any(self.loads):
            what = wrong[0] if wrong else f"all {len(self.loads)} loads are 0"
            raise InputError(
                f"routing {self.name}: {what}; loads must be numbers from 0 on, not all 0"
            )

    def check(self, num_experts: int) -> None:
        """Raise InputError if the loads are of another number of experts."""
        if self.loads is not None and len(self.loads) != num_experts:
            raise InputError(
                f"routing {self.name} has the loads of {len(self.loads)} experts, and the model "
                f"has {num_experts}",
                "name a file of this model, or use --routing natural",
            )

    def skew(self, num_experts: int, top_k: float, ep: int) -> float:
        """Return the fullest rank's rows over the mean, averaged over seeded placements."""
        if self.name == "balanced" or ep == 1:
            return 1.0
        return sum(_fullest_shares(self.loads or natural_loads(num_experts), top_k, ep)) * ep

    def shares(self, top_k: float) -> tuple[float, ...] | None:
        """Return each expert's share of all rows, 1/k at most; None for a law."""
        return None if self.loads is None else _cap_shares(self.loads, 1 / top_k)

    def skew_in_order(
        self, num_experts: int, top_k: float, ep: int, experts: tuple[int, ...] = ()
    ) -> float:
        """Return the fullest rank's rows over the mean, where each rank has consecutive places.

        Rank r of ep holds the experts of places r·E/ep to (r+1)·E/ep − 1, as in layers. Loads of
        a law have no order, so that their experts are placed at random.

        Args:
            experts: expert of each place; empty for the natural order.
        """
        if self.loads is None or ep == 1:
            return self.skew(num_experts, top_k, ep)
        return max(map(sum, self._by_rank(top_k, ep, experts))) * ep

    def fullest_shares(
        self, num_experts: int, top_k: float, ep: int, experts: tuple[int, ...] = ()
    ) -> tuple[float, ...]:
        """Return the fullest rank's shares of its rows, descending, 1 in all; () if balanced."""
        if self.name == "balanced":
            return ()
        if self.loads is None:
            fullest = _fullest_shares(natural_loads(num_experts), top_k, ep)
        else:
            fullest = max(self._by_rank(top_k, ep, experts), key=sum)
        return tuple(share / sum(fullest) for share in sorted(fullest, reverse=True))

    def _by_rank(self, top_k: float, ep: int, experts: tuple[int, ...]) -> list[list[float]]:
        """Return each rank's shares of all rows, by its experts."""
        shares = self.shares(top_k) or ()
        placed = [shares[expert] for expert in experts] if experts else list(shares)
        local = len(placed) // ep
        return [placed[rank * local : (rank + 1) * local] for rank in range(ep)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRouting:
    """Routing that a layer's plan is for.

    Args:
        spread: the fullest rank's rows, 99th percentile of steps over their median; 1 or more.
    """

    loads: ExpertLoads
    spread: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.spread) or self.spread < 1:
            raise InputError(f"the spread of a routing must be 1 or more, got {self.spread:g}")

    def __str__(self) -> str:
        """Return "", "natural", or loads and spread: "5 4 2 1 / 1.3"."""
        if self.loads.loads is None:
            return "" if self.loads.name == "balanced" else self.loads.name
        loads = " ".join(f"{load:.9g}" for load in self.loads.loads)
        return f"{loads} / {self.spread:.9g}"

    @classmethod
    def of(cls, text: str) -> "LayerRouting":
        """Return the routing of a text that `str` gives; raises InputError for another text."""
        if text in {"", "balanced", "natural"}:
            return cls(loads=ExpertLoads(name=text or "balanced"))
        loads, _, spread = text.partition("/")
        try:
            numbers = tuple(map(float, (loads or text).split()))
            return cls(loads=ExpertLoads(name="recorded", loads=numbers), spread=float(spread or 1))
        except ValueError:
            raise InputError(
                f"routing {text[:80]!r} is neither balanced nor natural, and has no loads",
                'give "natural", or a load for each expert and their spread: "5 4 2 1 / 1.3"',
            ) from None

    def skew(
        self, *, num_experts: int, top_k: int, ranks: int, experts: tuple[int, ...] = ()
    ) -> "RankSkew":
        """Return how full the fullest rank is; raises InputError for another number of experts."""
        self.loads.check(num_experts)
        mean = self.loads.skew_in_order(num_experts, top_k, ranks, experts)
        shares = self.loads.fullest_shares(num_experts, top_k, ranks, experts)
        return RankSkew(mean=mean, p99=min(float(ranks), mean * self.spread), shares=shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSkew:
    """Rows of the fullest rank over the mean of all ranks.

    Args:
        mean: mean over the steps, for times.
        p99: 99th percentile over the steps, for memory.
        shares: share of that rank's rows that each of its experts has; empty if about equal.
    """

    mean: float = 1.0
    p99: float = 1.0
    shares: tuple[float, ...] = ()


EVEN = RankSkew()
BALANCED, NATURAL = ExpertLoads(), ExpertLoads(name="natural")


@cache
def natural_loads(num_experts: int) -> tuple[float, ...]:
    """Return the loads of natural routing: the quantiles of a power law.

    x(u) = (1 + u·(L^(1−a) − 1))^(1/(1−a)), from 1 to L with exponent a
    """
    power = 1 - _EXPONENT
    return tuple(
        (1 + (index + 0.5) / num_experts * (_LARGEST**power - 1)) ** (1 / power)
        for index in range(num_experts)
    )


@lru_cache(maxsize=1024)
def _cap_shares(loads: tuple[float, ...], most: float) -> tuple[float, ...]:
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
    return tuple(shares)


@cache
def _fullest_shares(loads: tuple[float, ...], top_k: float, ep: int) -> list[float]:
    """Return the shares of the fullest rank's experts, descending, as means over placements."""
    import numpy as np  # loads in a tenth of a second, which balanced routing does not need

    drawn, shares = np.random.default_rng(0), np.array(_cap_shares(loads, 1 / top_k))
    ranks = [drawn.permutation(shares).reshape(ep, -1) for _ in range(_NUM_PLACEMENTS)]
    fullest = [np.sort(rank[rank.sum(axis=1).argmax()])[::-1] for rank in ranks]
    means: list[float] = np.mean(fullest, axis=0).tolist()
    return means
