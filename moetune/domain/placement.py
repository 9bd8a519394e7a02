"""Experts in the order of the ranks: which expert each place of a layer has, and why.

Every rank has equally many places. A hot expert may have replicas, places on several ranks among
which its tokens are divided; a place may then be empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError

PlacementRule = Literal["planned", "once", "natural"]
EMPTY = -1
"""In place of the expert of a place that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChoice:
    """Replicas of hot experts, against the best placement without any.

    Args:
        is_taken: whether the plan has them; otherwise they are the best that were found.
        num_replicas: places of experts beyond the first one of each.
        added_places: of every rank, each with the memory of one expert.
        skew: rows of the fullest rank over the mean, which none is below.
        step_seconds: predicted step, with `sum_seconds`.
        sum_seconds: of the replicas' gradients, in every backward pass, hidden by nothing.
    """

    is_taken: bool
    num_replicas: int
    added_places: int
    skew: float
    step_seconds: float
    sum_seconds: float

    @property
    def words(self) -> str:
        """How many they are."""
        return f"{self.num_replicas} replica{'s' * (self.num_replicas > 1)} of hot ones"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """A plan's placement of experts on ranks, against their natural order.

    Args:
        experts: expert of each place, of which rank r has the r-th of equal parts; empty for the
            natural order.
        natural_skew, placed_skew: rows of the fullest rank over the mean in the natural order, and
            with the best placement that was found of each expert in one place.
        least_skew: no placement is below.
        natural_step_seconds: predicted step of the natural order; None where it does not fit.
        placed_step_seconds: predicted step of the placement.
        why: the reason for the one or the other.
        replicas: None where the placement is even enough without, and in older plans.

    Raises:
        InputError: an expert has no place.
    """

    experts: tuple[int, ...] = ()
    natural_skew: float
    placed_skew: float
    least_skew: float
    natural_step_seconds: float | None
    placed_step_seconds: float
    why: str
    replicas: ReplicaChoice | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        if self.experts and not self.has_replicas:
            check_order(self.experts, len(self.experts))

    @property
    def gain(self) -> float | None:
        """Share of the natural order's step that the placement saves."""
        if not self.natural_step_seconds:
            return None
        return 1 - self.placed_step_seconds / self.natural_step_seconds

    @property
    def has_replicas(self) -> bool:
        """Whether experts have places on several ranks."""
        return self.replicas is not None and self.replicas.is_taken

    @property
    def replica_words(self) -> str:
        """How many replicas there are, or might be: "2 replicas of hot ones"."""
        return "no replicas" if self.replicas is None else self.replicas.words


def check_order(experts: Sequence[int], num_experts: int) -> None:
    """Raise InputError unless each of so many experts has one place."""
    if sorted(experts) == list(range(num_experts)):
        return
    missing = sorted(set(range(num_experts)) - set(experts))
    what = f"{len(experts)} places for {num_experts} experts"
    if len(experts) == num_experts:
        what = f"no place for expert {missing[0]}"
    raise InputError(
        f"a placement must have each expert once, this one has {what}",
        "give the expert of each place in the order of the ranks, such as (0, 3, 1, 2)",
    )


def check_all_placed(experts: Sequence[int]) -> None:
    """Raise InputError unless every expert up to the last one has a place."""
    missing = sorted({*range(max(experts) + 1)} - {*experts})
    if missing or min(experts) < EMPTY:
        what = f"no place for expert {missing[0]}" if missing else f"expert {min(experts)}"
        raise InputError(
            f"a placement with replicas must have every expert, this one has {what}",
            f"give the expert of each place in the order of the ranks, {EMPTY} for none",
        )


def check_places(experts: Sequence[int], num_experts: int, num_ranks: int) -> None:
    """Raise InputError unless the experts of equally many places a rank are a placement.

    Each expert has one place, or replicas on several ranks.
    """
    if len(experts) <= num_experts:
        check_order(experts, num_experts)
        return
    each, left = divmod(len(experts), num_ranks)
    found = [expert for expert in experts if expert != EMPTY]
    missing = sorted(set(range(num_experts)) - set(found))
    wrong = ""
    if left:
        wrong = f"{len(experts)} places on {num_ranks} ranks"
    elif missing:
        wrong = f"no place for expert {missing[0]}"
    elif not set(found) <= set(range(num_experts)):
        wrong = f"a place for expert {max(found)} of {num_experts}"
    elif each >= num_experts:
        wrong = f"{each} places on each rank for {num_experts} experts"
    for rank in range(num_ranks):
        mine = [one for one in experts[rank * each : (rank + 1) * each] if one != EMPTY]
        if not wrong and len(set(mine)) < len(mine):
            twice = next(one for one in mine if mine.count(one) > 1)
            wrong = f"expert {twice} more than once on rank {rank}"
    if wrong:
        raise InputError(
            "a placement with replicas must have every expert, at most once on a rank, in equally "
            f"many places of each rank, fewer than experts; this one has {wrong}",
            f"give the expert of each place in the order of the ranks, {EMPTY} for none",
        )


def places_of(experts: Sequence[int]) -> tuple[int, ...]:
    """Return the place of each expert, its first one, from the expert of each place."""
    return tuple(places[0] for places in replicas_of(experts))


def replicas_of(experts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return all places of each expert, ascending, from the expert of each place."""
    found: list[list[int]] = [[] for _ in range(max(experts) + 1)]
    for place, expert in enumerate(experts):
        if expert != EMPTY:
            found[expert].append(place)
    return tuple(tuple(places) for places in found)


def has_replicas(experts: Sequence[int]) -> bool:
    """Return whether an expert has several of the places."""
    found = [expert for expert in experts if expert != EMPTY]
    return len(set(found)) < len(found)


def busiest_sum(experts: Sequence[int], num_ranks: int) -> float:
    """Return the experts whose gradients a rank sends, and receives, to sum those of replicas.

    Of the rank with the most. Each of n replicas sums 1/n of an expert's gradient, of which it
    gets n − 1 parts, and sends the sum to the n − 1 others: twice (n − 1)/n of the expert.
    """
    return max(
        (2 * sum(1 - 1 / n for n in mine) for mine in _numbers(experts, num_ranks)), default=0
    )


def most_replicas(experts: Sequence[int], num_ranks: int) -> int:
    """Return the replicated experts of the rank with the most."""
    return max((sum(n > 1 for n in mine) for mine in _numbers(experts, num_ranks)), default=0)


def _numbers(experts: Sequence[int], num_ranks: int) -> Iterator[list[int]]:
    """Yield the number of replicas of each of a rank's experts."""
    if not experts:
        return
    numbers = [len(places) for places in replicas_of(experts)]
    each = len(experts) // num_ranks
    for rank in range(num_ranks):
        mine = experts[rank * each : (rank + 1) * each]
        yield [numbers[one] for one in mine if one != EMPTY]
