"""Recorded layers of a model with replicas of hot experts, where placing each once is uneven."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.model_placement import LayerPlacement
from moetune.domain.placement import EMPTY, busiest_sum
from moetune.solve.joint.placed_layers import PlacedLayers
from moetune.solve.layer.expert_groups import group_replicas
from moetune.solve.layer.replica_search import EVEN

_MOST_ADDED = 4
"""Places of a rank beyond its equal part of the experts, as in plans of layers."""
_MOST_TRIALS = 200
"""Of branch and bound for one placement; models have up to a hundred layers."""
_LESS = 0.02
"""Share of the fullest rank's rows that one more place of each rank has to take off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedLayers(PlacedLayers):
    """Layers whose experts are placed by their loads, hot ones on several ranks.

    Not safe for several threads.

    Args:
        once: the same layers with each expert in one place.
    """

    once: PlacedLayers

    @classmethod
    def of_placed(cls, once: PlacedLayers) -> "ReplicatedLayers":
        """Return the layers with replicas."""
        return cls(name=once.name, layers=once.layers, once=once)

    def fullest_at_least(self, layer: int, ep: int) -> float:  # noqa: ARG002 - of all layers
        """Return the mean: replicas may make ranks even."""
        return 1.0

    def added_places(self, layer: int | None, ep: int) -> int:
        """Return the places of each rank beyond its equal part of the experts."""
        if layer is None:
            return 0
        experts = self.placement(layer, ep).experts
        return max(0, len(experts) - self.layers[layer].num_experts) // ep

    def summed_experts(self, layer: int | None, ep: int) -> float:
        """Return the experts whose values a rank sends to other replicas, and of gradients."""
        if layer is None:
            return 0.0
        found = self.placement(layer, ep)
        return busiest_sum(found.experts, ep) if found.has_replicas else 0.0

    def _place(self, layer: int, ep: int) -> LayerPlacement:
        best, one = self.once.placement(layer, ep), self.layers[layer]
        shares = one.loads.shares(one.top_k)
        assert shares is not None  # noqa: S101 - records have loads of single experts
        each = one.num_experts // ep
        for added in range(1, min(_MOST_ADDED, one.num_experts - 1 - each) + 1):
            if best.skew <= EVEN or ep == 1:
                break
            found = _replicated(shares, ep, each + added)
            if found is None:
                continue
            experts, skew = found
            if skew <= best.skew * (1 - _LESS):
                best = LayerPlacement(
                    experts=experts, natural_skew=best.natural_skew, placed_skew=skew,
                    least_skew=1.0,
                )  # fmt: skip
        return best


def _replicated(
    shares: Sequence[float], num_ranks: int, places: int
) -> tuple[tuple[int, ...], float] | None:
    """Return the expert of each place, and the fullest rank's rows over the mean.

    The next replica is always of the expert whose replicas have most rows each, as in DeepSeek's
    EPLB, until ranks have no place left or none helps.

    Args:
        places: of each rank.

    Returns:
        None where the last replicas found room only beside another one of their experts.
    """
    numbers, even = [1] * len(shares), sum(shares) / num_ranks
    for _ in range(places * num_ranks - len(shares)):
        hot = [one for one, number in enumerate(numbers) if number < num_ranks]
        hottest = max(hot, key=lambda one: (shares[one] / numbers[one], -one), default=None)
        if hottest is None or shares[hottest] / numbers[hottest] * places <= even:
            break  # no heavier than a mean place
        numbers[hottest] += 1
    experts = [expert for expert, number in enumerate(numbers) for _ in range(number)]
    loads = [shares[expert] / numbers[expert] for expert in experts]
    num_empty = places * num_ranks - len(experts)
    groups = group_replicas(
        [*loads, *[0.0] * num_empty], [*experts, *range(-num_empty, 0)], num_ranks,
        tolerance=EVEN - 1, most_trials=_MOST_TRIALS,
    )  # fmt: skip
    if groups is None:
        return None
    named = [*experts, *[EMPTY] * num_empty]
    ranks = [sorted((named[at] for at in group), key=_empty_last) for group in groups.groups]
    placed = tuple(expert for rank in ranks for expert in rank)
    return placed, groups.fullest * num_ranks


def _empty_last(expert: int) -> tuple[bool, int]:
    return expert == EMPTY, expert
