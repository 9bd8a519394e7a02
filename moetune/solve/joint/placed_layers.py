"""Recorded layers of a model with their experts placed by their loads, each layer by itself."""

from dataclasses import dataclass

from moetune.domain.once import once
from moetune.domain.placement import LayerPlacement
from moetune.domain.recorded_layers import RecordedLayers
from moetune.solve.layer.placed import least_fullest, place_experts


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
        return place_experts(self._shares(layer), ep, natural_skew=self.layers[layer].fullest(ep))

    def _least(self, layer: int, ep: int) -> float:
        return 1.0 if ep == 1 else least_fullest(self._shares(layer), ep) * ep

    def _shares(self, layer: int) -> tuple[float, ...]:
        one = self.layers[layer]
        shares = one.loads.shares(one.top_k)
        assert shares is not None  # noqa: S101 - records have loads of single experts
        return shares
