"""Recorded layers of a model with their experts placed by their loads, each layer by itself."""

from dataclasses import dataclass

from moetune.domain.model_placement import LayerPlacement
from moetune.domain.once import once
from moetune.domain.recorded_layers import RecordedLayers
from moetune.solve.layer.expert_groups import ExpertGroups, group_experts, least_fullest

CLOSE = 0.002
"""Share of the fullest rank's rows within which a placement is as good as a better one: a tenth of
what makes one worth while."""
_MOST_TRIALS = 5_000
"""Of branch and bound for one layer; models have up to a hundred."""
_SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayers(RecordedLayers):
    """Layers whose experts are placed by their loads, where that is better than their order."""

    @classmethod
    def of(cls, natural: RecordedLayers) -> "PlacedLayers":
        """Return the layers with their experts placed."""
        return cls(name=natural.name, layers=natural.layers)

    def fullest(self, layer: int, ep: int) -> float:
        """Return the fullest rank's rows of a layer over the mean."""
        return self.placement(layer, ep).placed_skew

    def fullest_at_least(self, layer: int, ep: int) -> float:
        """Return what `fullest` is at least, without placing anything."""
        return min(self.layers[layer].fullest(ep), self._least(layer, ep))

    def placements(self, ep: int) -> tuple[LayerPlacement, ...]:
        """Return the placement of every layer on ep ranks."""
        return tuple(self.placement(layer, ep) for layer in range(len(self.layers)))

    @once(lambda layer, ep: (layer, ep))
    def placement(self, layer: int, ep: int) -> LayerPlacement:
        """Return the placement of a layer on ep ranks."""
        natural = self.layers[layer].fullest(ep)
        least = min(natural, self._least(layer, ep))
        found = self._groups(layer, ep) if natural > least * (1 + _SAME) else None
        if found is None or found.fullest * ep >= natural * (1 - _SAME):
            return LayerPlacement(natural_skew=natural, placed_skew=natural, least_skew=least)
        return LayerPlacement(
            experts=tuple(expert for group in found.groups for expert in group),
            natural_skew=natural, placed_skew=found.fullest * ep,
            least_skew=min(found.fullest, found.least) * ep,
        )  # fmt: skip

    def _groups(self, layer: int, ep: int) -> ExpertGroups:
        return group_experts(self._shares(layer), ep, tolerance=CLOSE, most_trials=_MOST_TRIALS)

    def _least(self, layer: int, ep: int) -> float:
        return 1.0 if ep == 1 else least_fullest(self._shares(layer), ep) * ep

    def _shares(self, layer: int) -> tuple[float, ...]:
        one = self.layers[layer]
        shares = one.loads.shares(one.top_k)
        assert shares is not None  # noqa: S101 - records have loads of single experts
        return shares
