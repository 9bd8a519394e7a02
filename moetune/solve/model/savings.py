"""Shorter steps that a question has with one flag changed, and without its pins.

Each is the answer of a search, so that whoever changes the flag gets the layout that is named.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from moetune.domain.training import FoldedLayout, LayoutRequest
from moetune.solve.model.best import BestLayouts, as_graphed, with_graphs
from moetune.solve.model.search import FoldedSearch, PricedLayout

LEAST_SAVED = 0.02
"""Of a step: less is not worth a word."""
_WAITED = 0.1
"""Of a step, from which on it is said what hides more of the replicas' collectives."""


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
        if not self.pins.pinned:
            return None
        free = LayoutRequest()
        plain = BestLayouts.of(self.search, free).best()
        graphed = with_graphs(self.search, free, plain)
        best = plain if graphed is None else graphed.best()
        return FoundSaving(change="", found=best) if best.step.seconds < self._most else None

    def of_flags(self) -> list[FoundSaving]:
        """Return faster layouts with one flag changed, the fastest first.

        A pin has the value that is best beside the other pins; CUDA graphs, each that the runtime
        has; and what memory alone forbids.
        """
        every = (*self._other_pins(), *self._graphs(), *self._beyond_memory())
        return sorted(every, key=lambda one: one.found.step.seconds)

    def _other_pins(self) -> Iterator[FoundSaving]:
        for name in self.pins.pinned:
            if name != "cuda_graphs":  # each of them is tried in any case
                yield from self._below(self.pins.without([name]), name)

    def _graphs(self) -> Iterator[FoundSaving]:
        for graphs in self.search.target.cuda_graphs:
            if graphs != self.best.layout.cuda_graphs:
                yield from self._below(replace(self.pins, cuda_graphs=graphs), "cuda_graphs")

    def _beyond_memory(self) -> Iterator[FoundSaving]:
        """Yield faster layouts that differ in a single flag and do not fit.

        Nothing is recomputed; and where collectives of gradients and parameters bind, fewer states
        are sharded, or a micro-batch has more tokens to hide them beside.
        """
        layout = self.best.layout
        changes: list[tuple[str, Any]] = [("recompute", ())] if layout.recompute else []
        if self._waits_for_replicas:
            fewer = [one for one in self.search.target.zero if 1 <= one < layout.zero]
            changes += [("zero", one) for one in fewer[-1:]]
            changes.append(("micro_batch", 2 * layout.micro_batch))
        for name, value in changes:
            if getattr(self.pins, name) is None:
                values: dict[str, Any] = {name: value}
                yield from self._if_only_memory_lacks(layout.changed(degree=None, **values), name)

    @property
    def _waits_for_replicas(self) -> bool:
        step = self.best.step
        waited = step.bound_by_replicas + step.parts["gradients"]
        return waited >= _WAITED * step.seconds

    def _if_only_memory_lacks(self, layout: FoldedLayout, name: str) -> Iterator[FoundSaving]:
        if not self.search.space.is_allowed(layout):
            return
        priced = self.search.priced(layout)
        if priced.step.seconds < self._most and not self.search.fits(layout):
            yield FoundSaving(change=self._change(layout, name), found=priced)

    def _below(self, pins: LayoutRequest, name: str) -> Iterator[FoundSaving]:
        """Yield the best layout with other pins, if it is worth a word.

        Args:
            name: the field that is another one, or that the pins have no more.
        """
        pins = as_graphed(pins, self.best.layout)
        found = BestLayouts.of(self.search, pins).best_below(self._most)
        if found is not None:
            yield FoundSaving(change=self._change(found.layout, name), found=found)

    def _change(self, layout: FoldedLayout, name: str) -> str:
        """Return the flag with the value that a layout has; a pin that it has not is left out."""
        value: dict[str, Any] = {name: getattr(layout, name)}
        if value[name] is None:
            return f"leaving out {self.pins.only(name).words}"
        return LayoutRequest(**value).words

    @property
    def _most(self) -> float:
        return self.best.step.seconds * (1 - LEAST_SAVED)
