"""Dispatchers that go with layouts, by the seconds of a micro-batch with them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moetune.domain.training import FoldedLayout, LayoutRequest, Overlap, Recompute, TokenDispatcher
from moetune.solve.joint.space import LayoutSpace
from moetune.solve.training.step import StepPrices


class PricedDispatcher(NamedTuple):
    """A dispatcher beside an overlap, with the seconds of a micro-batch in the whole model."""

    seconds: float
    dispatcher: TokenDispatcher
    overlap: Overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDispatchers:
    """Dispatchers of the layouts of one search, ranked once. Not safe for several threads."""

    space: LayoutSpace
    prices: StepPrices
    pins: LayoutRequest
    _able: dict[tuple[object, ...], list[TokenDispatcher]] = field(
        default_factory=dict, init=False, repr=False
    )
    _ranked: dict[tuple[object, ...], tuple[PricedDispatcher, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _least: dict[tuple[object, ...], float] = field(default_factory=dict, init=False, repr=False)

    def ranked(
        self, layout: FoldedLayout, recompute: tuple[Recompute, ...]
    ) -> tuple[PricedDispatcher, ...]:
        """Return the dispatchers that go with a layout, the fastest first.

        There is none where its overlap does not go with what it recomputes.
        """
        key = *_of_ranks(layout), recompute
        found = self._ranked.get(key)
        if found is None:
            found = self._ranked[key] = self._rank(layout, recompute)
        return found

    def seconds(self, layout: FoldedLayout, recompute: tuple[Recompute, ...]) -> float:
        """Return the seconds of a micro-batch with the fastest dispatcher; infinite without one."""
        ranked = self.ranked(layout, recompute)
        return ranked[0].seconds if ranked else float("inf")

    def at_least(self, layout: FoldedLayout) -> float:
        """Return seconds that a micro-batch takes at least, before any chunks are priced.

        That is true of all layouts that recompute as much or more.
        """
        if layout.overlap != "chunks":
            return self.seconds(layout, layout.recompute)
        key = _of_ranks(layout)
        found = self._least.get(key)
        if found is None:
            able = self._able_of(layout)
            every = (
                self.prices.micro_batch_at_least(layout.changed(dispatcher=name)) for name in able
            )
            found = self._least[key] = min(every, default=float("inf"))
        return found

    def least_seconds(
        self, layout: FoldedLayout, recomputes: Sequence[tuple[Recompute, ...]]
    ) -> float:
        """Return the seconds of a micro-batch with the fastest of some lists of modules.

        That is the empty one, but in chunks, whose degrees each list chooses.
        """
        if () in recomputes and layout.overlap != "chunks":
            return self.seconds(layout, ())
        return min(self.seconds(layout, one) for one in recomputes)

    def _rank(
        self, layout: FoldedLayout, recompute: tuple[Recompute, ...]
    ) -> tuple[PricedDispatcher, ...]:
        seconds = self.prices.micro_batch_seconds
        one = layout if recompute == layout.recompute else layout.changed(recompute=recompute)
        if not self.space.may_overlap(one):
            return ()
        priced = [
            PricedDispatcher(seconds(one.changed(dispatcher=name)), name, one.overlap)
            for name in self._able_of(layout)
        ]
        return tuple(sorted(priced, key=lambda one: one.seconds))

    def _able_of(self, layout: FoldedLayout) -> list[TokenDispatcher]:
        key = layout.tp, layout.ep, layout.etp, layout.overlap
        if key not in self._able:
            self._able[key] = self.space.dispatchers(layout, self.pins)
        return self._able[key]


def _of_ranks(layout: FoldedLayout) -> tuple[object, ...]:
    return layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.overlap
