"""Routing of a model whose layers were recorded one by one: how full each one's fullest rank is.

All ranks wait for the fullest one of each layer, and that is another one in every layer.
"""

from dataclasses import dataclass, replace
from statistics import fmean

from moetune.domain.architecture import Decoder
from moetune.domain.once import Tables, once
from moetune.domain.routing import ExpertLoads, RankSkew


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayer:
    """Routing of one layer.

    Args:
        loads: of each of its experts.
        spread: of the steps, as in `LayerRouting`.
        top_k: experts that a token reaches.
    """

    loads: ExpertLoads
    spread: float
    top_k: float

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return len(self.loads.loads or ())

    def fullest(self, ep: int) -> float:
        """Return the fullest rank's rows over the mean, in the experts' own order."""
        return self.loads.skew_in_order(self.num_experts, self.top_k, ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLayers(Tables):
    """Routing of a model's layers of experts, in their order.

    Args:
        name: of the record's file.
    """

    name: str
    layers: tuple[RecordedLayer, ...]

    @once(lambda layer, ep: (layer, ep))
    def skew(self, layer: int | None, ep: int) -> RankSkew:
        """Return how full the fullest of ep ranks is.

        Args:
            layer: its number; None for the mean of all, at least.
        """
        if layer is not None:
            return self._with_spread(layer, self.fullest(layer, ep), ep)
        every = [
            self._with_spread(one, self.fullest_at_least(one, ep), ep)
            for one in range(len(self.layers))
        ]
        return RankSkew(mean=fmean(one.mean for one in every), p99=fmean(one.p99 for one in every))

    def fullest(self, layer: int, ep: int) -> float:
        """Return the fullest rank's rows of a layer over the mean."""
        return self.layers[layer].fullest(ep)

    def fullest_at_least(self, layer: int, ep: int) -> float:
        """Return what `fullest` is at least, sooner."""
        return self.fullest(layer, ep)

    def told_apart(self, decoder: Decoder) -> Decoder:
        """Return the model with the number of its record in every layer of experts.

        Layers with the same record have the same number. Layers of multi-token prediction, which
        no record has, have none.
        """
        first = {layer: number for number, layer in reversed([*enumerate(self.layers)])}
        numbers = iter(first[layer] for layer in self.layers)
        return replace(
            decoder,
            blocks=tuple(
                block if block.routed is None else block.with_record(next(numbers))
                for block in decoder.blocks
            ),
        )

    def _with_spread(self, layer: int, mean: float, ep: int) -> RankSkew:
        return RankSkew(mean=mean, p99=min(float(ep), mean * self.layers[layer].spread))


def alike(decoder: Decoder) -> Decoder:
    """Return the model without numbers of records."""
    return replace(decoder, blocks=tuple(block.with_record(None) for block in decoder.blocks))
