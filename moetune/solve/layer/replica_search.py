"""Placements with replicas of hot experts: how many of which, and on which ranks.

The next replica is always of the expert whose replicas have the most rows each, as in DeepSeek's
EPLB; from each number of them single replicas are added, removed and exchanged as long as that
helps. Groups are those of `expert_groups`, with empty places where ranks have more than are needed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from moetune.domain.placement import EMPTY
from moetune.solve.layer.expert_groups import group_replicas

EVEN = 1.02
"""Rows of the fullest rank over the mean below which no more replicas are tried."""
_STEP = 1.25
"""Ratio of a number of replicas to the next one that is tried."""
_MOST_WORK = 16_384
"""Places of all trials of single replicas: a few tenths of a second."""
_FEWEST_TRIALS = 16
_MOST_TRIALS = 2_000
"""Of branch and bound for one placement."""
_SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlacement:
    """A placement with replicas.

    Args:
        experts: of each place.
        numbers: of each expert's places.
        skew: rows of the fullest rank over the mean.
        hottest: experts of the fullest rank.
        seconds: its price.
    """

    experts: tuple[int, ...]
    numbers: tuple[int, ...]
    skew: float
    hottest: tuple[int, ...]
    seconds: float

    @property
    def num_replicas(self) -> int:
        """Places of experts beyond one for each."""
        return sum(self.numbers) - len(self.numbers)


Price = Callable[[tuple[int, ...], float], float]
"""Seconds of a placement, from the expert of each place and the fullest rank's rows."""


def search_replicas(
    shares: Sequence[float], num_ranks: int, *, most_added: int, price: Price
) -> tuple[ReplicaPlacement, ...]:
    """Return the cheapest placement that was found for each number of added places, best first.

    Args:
        shares: of all rows, of each expert.
        most_added: places of each rank beyond its equal part of the experts; it has fewer than
            experts then.
        price: of a placement; deterministic.
    """
    search = _Search(shares, num_ranks, most_added * num_ranks, price)
    search.add_greedily()
    search.climb()
    cheapest: dict[int, ReplicaPlacement] = {}
    for one in sorted(search.found, key=lambda one: (one.seconds, one.num_replicas)):
        cheapest.setdefault(len(one.experts), one)
    return tuple(cheapest.values())


class _Search:
    """Numbers of replicas that were tried, each once.

    Attributes:
        found: their placements.
    """

    def __init__(
        self, shares: Sequence[float], num_ranks: int, most_replicas: int, price: Price
    ) -> None:
        self._shares, self._num_ranks, self._price = shares, num_ranks, price
        self._most_places = len(shares) + most_replicas
        self._tried: set[tuple[int, ...]] = set()
        self.found: list[ReplicaPlacement] = []

    def add_greedily(self) -> None:
        """Try more and more replicas, until the ranks are even."""
        numbers, due = [1] * len(self._shares), 1
        for number in range(1, self._most_places - len(numbers) + 1):
            hot = [expert for expert, each in enumerate(numbers) if each < self._num_ranks]
            numbers[max(hot, key=lambda one: (self._shares[one] / numbers[one], -one))] += 1
            if number < due:
                continue
            due = max(number + 1, int(number * _STEP))
            placement = self._try(tuple(numbers))
            if placement is not None and placement.skew <= EVEN:
                return

    def climb(self) -> None:
        """Move from each placement, the cheapest first, to cheaper ones beside it."""
        left = max(_FEWEST_TRIALS, _MOST_WORK // self._most_places)
        for start in sorted(self.found, key=lambda one: (one.seconds, one.num_replicas)):
            best: ReplicaPlacement | None = start
            while best is not None and left > 0:
                tried, best = self._step(best, left)
                left -= tried

    def _step(self, best: ReplicaPlacement, most: int) -> tuple[int, ReplicaPlacement | None]:
        """Return the first cheaper placement beside one, and the trials; None for none."""
        tried = 0
        for numbers in islice(self._beside(best), most):
            tried += 1
            one = self._try(numbers)
            if one is not None and one.seconds < best.seconds * (1 - _SAME):
                return tried, one
        return tried, None

    def _beside(self, best: ReplicaPlacement) -> Iterator[tuple[int, ...]]:
        """Yield numbers with a replica more on the fullest rank, one less, or both."""
        heavy = sorted(best.hottest, key=lambda one: -self._shares[one] / best.numbers[one])
        light = [expert for expert, each in enumerate(best.numbers) if each > 1]
        light.sort(key=lambda one: self._shares[one] / best.numbers[one])
        for more in (*heavy, None):
            for less in (None, *light):
                numbers = list(best.numbers)
                if more is not None:
                    numbers[more] += 1
                if less is not None:
                    numbers[less] -= 1
                is_allowed = max(numbers) <= self._num_ranks and sum(numbers) <= self._most_places
                if is_allowed and sum(numbers) > len(numbers) and tuple(numbers) not in self._tried:
                    yield tuple(numbers)

    def _try(self, numbers: tuple[int, ...]) -> ReplicaPlacement | None:
        """Return the placement with so many places of each expert, None where none was found."""
        self._tried.add(numbers)
        experts = [expert for expert, number in enumerate(numbers) for _ in range(number)]
        loads = [self._shares[expert] / numbers[expert] for expert in experts]
        num_empty = -len(experts) % self._num_ranks
        experts += range(-num_empty, 0)
        groups = group_replicas(
            [*loads, *[0.0] * num_empty], experts, self._num_ranks, most_trials=_MOST_TRIALS
        )
        if groups is None:
            return None
        ranks = [
            sorted((experts[at] for at in group), key=lambda one: (one < 0, one))
            for group in groups.groups
        ]
        fullest = max(ranks, key=lambda rank: self._load(rank, numbers))
        placed = tuple(max(expert, EMPTY) for rank in ranks for expert in rank)
        skew = groups.fullest * self._num_ranks
        one = ReplicaPlacement(
            experts=placed, numbers=numbers, skew=skew, hottest=tuple(e for e in fullest if e >= 0),
            seconds=self._price(placed, skew),
        )  # fmt: skip
        self.found.append(one)
        return one

    def _load(self, rank: Sequence[int], numbers: Sequence[int]) -> float:
        return sum(self._shares[one] / numbers[one] for one in rank if one >= 0)
