"""Shorter steps that a question has with one flag changed, and without its pins.

Each is the answer of a search, so that whoever changes the flag gets the layout that is named.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.solve.joint.best import BestLayouts
from moetune.solve.joint.pins import pin_flag, pinned, without
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import PricedLayout

LEAST_SAVED = 0.02
"""Of a step: less is not worth a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSaving:
    """A faster layout, and the flag that leads to it.

    Args:
        change: the flag with its value; "" for the question without pins.
    """

    change: str
    found: PricedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Faster layouts than a search's answer.

    Args:
        pins: that the answer obeys.
        best: the answer, which fits.
    """

    search: FoldedSearch
    pins: LayoutRequest
    best: PricedLayout

    def free(self) -> FoundSaving | None:
        """Return the best layout without pins; None where it is not faster."""
        return self._below(LayoutRequest()) if pinned(self.pins) else None

    def of_flags(self) -> list[FoundSaving]:
        """Return faster layouts with one flag changed, the fastest first.

        A pin has the value that is best beside the other pins; CUDA graphs, which no search takes
        by itself, each that the runtime has; and nothing recomputed, whether it fits or not.
        """
        every = (*self._other_pins(), *self._graphs(), *self._without_recomputation())
        return sorted(every, key=lambda one: one.found.step.seconds)

    def _other_pins(self) -> Iterator[FoundSaving]:
        for name in pinned(self.pins):
            saving = self._below(without(self.pins, [name]), name)
            if saving is not None:
                yield saving

    def _graphs(self) -> Iterator[FoundSaving]:
        if self.pins.cuda_graphs is not None:
            return
        for graphs in self.search.target.cuda_graphs:
            if graphs != self.best.layout.cuda_graphs:
                saving = self._below(replace(self.pins, cuda_graphs=graphs), "cuda_graphs")
                if saving is not None:
                    yield saving

    def _without_recomputation(self) -> Iterator[FoundSaving]:
        if self.pins.recompute is not None or not self.best.layout.recompute:
            return
        plain = self.best.layout.changed(recompute=(), degree=None)
        priced = self.search.priced(plain)
        saves = priced.step.seconds < self._most and self.search.space.is_allowed(plain)
        if saves and not self.search.fits(plain):
            yield FoundSaving(change="--recompute none", found=priced)

    def _below(self, pins: LayoutRequest, name: str = "") -> FoundSaving | None:
        """Return the best layout with other pins, if it is worth a word.

        Args:
            name: the field that is another one, or that the pins have no more.
        """
        found = BestLayouts(self.search, pins).best_below(self._most)
        if found is None:
            return None
        return FoundSaving(change=self._change(found.layout, name) if name else "", found=found)

    def _change(self, layout: FoldedLayout, name: str) -> str:
        """Return the flag with the value that a layout has; a pin that it has not is left out."""
        value: dict[str, Any] = {name: getattr(layout, name)}
        if value[name] is None:
            return f"leaving out {pin_flag(self.pins, name)}"
        return pin_flag(replace(self.pins, **value), name)

    @property
    def _most(self) -> float:
        return self.best.step.seconds * (1 - LEAST_SAVED)
