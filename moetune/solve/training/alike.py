"""Layers of experts that differ in the records of their routing alone, priced at once."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from moetune.domain.arrays import split
from moetune.domain.experts import RoutedExperts
from moetune.solve.training.block import BlockPrices

_Priced = TypeVar("_Priced")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeLayers:
    """Layers of experts that are the same but for their records.

    Args:
        part: one of them.
        places: of each among the parts of a model.
        records: of each, where they differ; empty where they do not.
    """

    part: RoutedExperts
    places: tuple[int, ...]
    records: tuple[int | None, ...]

    def priced(
        self,
        prices: BlockPrices,
        price: Callable[[BlockPrices, RoutedExperts], _Priced],
    ) -> Sequence[_Priced]:
        """Return the price of each layer."""
        if not self.records:
            return [price(prices, self.part)] * len(self.places)
        records = tuple(dict.fromkeys(self.records))
        every = price(replace(prices, records=records), self.part)
        found = dict(zip(records, split(every, len(records)), strict=True))
        return [found[one] for one in self.records]


def alike_layers(parts: Iterable[RoutedExperts | None]) -> tuple[AlikeLayers, ...]:
    """Return a model's layers of experts, with those that are alike as one."""
    found: dict[RoutedExperts, list[tuple[int, RoutedExperts]]] = {}
    for place, part in enumerate(parts):
        if part is not None:
            found.setdefault(replace(part, record=None), []).append((place, part))
    return tuple(map(_alike, found.values()))


def _alike(layers: Sequence[tuple[int, RoutedExperts]]) -> AlikeLayers:
    records = tuple(part.record for _, part in layers)
    return AlikeLayers(
        part=layers[0][1], places=tuple(place for place, _ in layers),
        records=records if len({*records}) > 1 else (),
    )  # fmt: skip
