"""Edits of a layout: the steps by which a search goes from one layout to others near it.

They reach what branch and bound does not compare: any list of modules that is recomputed, any cut
into stages, any micro-batch that divides the step, any share in host memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from numpy.random import Generator

from moetune.domain.layout import divisors
from moetune.domain.pipeline import StageLetters, stages_of_sizes
from moetune.domain.training import RECOMPUTES, FoldedLayout, LayoutRequest, Recompute
from moetune.solve.joint.space import LayoutSpace
from moetune.solve.training.step import StepPrices

T = TypeVar("T")
_Edit: TypeAlias = Callable[[FoldedLayout, Generator], FoldedLayout | None]

_LARGEST_MICRO_BATCH = 32
_REPEATED_BY_MOE = frozenset({"moe_act", "shared_experts"})
_SHARE = 1 / 16
"""Of the optimizer that an edit moves to the host or back."""
_TRIES = 64
_GOES_ON, _OF_CUT = 0.3, 0.3
"""Probabilities of one more edit, and that a pipeline's is of its cut: of these there are most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutEdits:
    """Edits of a job's layouts that the rules and the pins allow.

    Args:
        prices: which stages are balanced by.
    """

    space: LayoutSpace
    prices: StepPrices
    pins: LayoutRequest

    def edited(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout | None:
        """Return another allowed layout, one or a few edits away; None where none was found."""
        edits = [*self._edits()]
        for _ in range(_TRIES):
            found = self._edited(layout, edits, draw)
            if found is not None and found != layout and self._is_allowed(found):
                return found
        return None

    def _edited(
        self, layout: FoldedLayout, edits: Sequence[_Edit], draw: Generator
    ) -> FoldedLayout | None:
        """Return what one or a few edits make, whether it is allowed or not."""
        found: FoldedLayout | None = layout
        while found is not None:
            is_of_cut = self.pins.stages is None and found.pp > 1 and draw.random() < _OF_CUT
            found = (self._with_cut if is_of_cut else _one_of(edits, draw))(found, draw)
            if draw.random() >= _GOES_ON:
                break
        return found

    def _is_allowed(self, layout: FoldedLayout) -> bool:
        return self.space.is_allowed(layout) and self.space.may_use_host(layout)

    def _edits(self) -> Iterator[_Edit]:
        """Yield the edits that change nothing pinned."""
        pins = self.pins
        yield self._with_other_ranks
        for name, edit in (
            ("micro_batch", self._with_micro_batch), ("recompute", self._with_modules),
            ("zero", self._with_zero), ("overlap", self._with_overlap),
            ("dispatcher", self._with_dispatcher), ("offload_activations", self._with_waiting),
            ("offload_optimizer", self._with_share),
        ):  # fmt: skip
            if getattr(pins, name) is None:
                yield edit
        yield self._with_pipeline

    def _with_other_ranks(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout | None:
        """Return a layout with one size changed, and as many replicas as there are ranks for."""
        name = _one_of(("tp", "cp", "pp", "ep", "etp"), draw)
        ranks = self.space.job.world_size
        size = _beside(getattr(layout, name), divisors(ranks), draw)
        is_pinned = getattr(self.pins, name) is not None
        if size is None or is_pinned or (name == "pp" and self.pins.stages is not None):
            return None
        one = layout.changed(**{name: size})
        if name == "pp":
            one = one.changed(vpp=self.pins.vpp or 1, schedule=self.pins.schedule, stages=None)
        sharers = one.tp * one.cp * one.pp
        return None if ranks % sharers else one.changed(dp=ranks // sharers)

    def _with_micro_batch(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout | None:
        sizes = divisors(self.space.job.global_batch // layout.dp or 1)
        size = _beside(
            layout.micro_batch, [one for one in sizes if one <= _LARGEST_MICRO_BATCH], draw
        )
        return None if size is None else layout.changed(micro_batch=size)

    def _with_modules(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout | None:
        """Return a layout that recomputes one module more or less, or all."""
        able = {*self.space.target.recompute} & self.space.job.decoder.modules
        if not able:
            return None
        module = _one_of([one for one in RECOMPUTES if one in able], draw)
        if {"full", "selective"} & {module, *layout.recompute}:
            return layout.changed(recompute=(module,))
        return layout.changed(recompute=_ordered({*layout.recompute} ^ {module}))

    def _with_cut(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout | None:
        """Return a pipeline with a block in another stage, or with equal or balanced stages."""
        plain = layout.changed(stages=None)
        way = draw.integers(8)
        if way == 0:
            return plain
        if way == 1 and self._is_allowed(plain):
            return self.prices.balanced(plain)
        return layout.changed(stages=self._moved(layout, draw))

    def _moved(self, layout: FoldedLayout, draw: Generator) -> StageLetters:
        decoder = self.space.job.decoder
        sizes = [word.count("t") for word in layout.stages_of(decoder)]
        giver = _one_of([at for at, size in enumerate(sizes) if size], draw)
        taker = int(draw.integers(len(sizes)))
        sizes[giver] -= 1
        sizes[taker] += 1
        return stages_of_sizes(sizes, len(decoder.predictions))

    def _with_zero(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout:
        return layout.changed(zero=_one_of(self.space.zeros(self.pins, layout.pp, layout.tp), draw))

    def _with_overlap(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout:
        return layout.changed(overlap=_one_of(self.space.target.overlaps, draw), degree=None)

    def _with_dispatcher(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout:
        return layout.changed(dispatcher=_one_of(self.space.target.dispatchers, draw))

    def _with_waiting(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout | None:
        num = self.space.job.decoder.num_layers
        count = _beside(layout.offloaded_layers(self.space.job.decoder), range(num), draw)
        return None if count is None else layout.changed(offload_activations=count / num)

    def _with_share(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout:
        share = layout.offload_optimizer + _one_of((-_SHARE, _SHARE), draw)
        return layout.changed(offload_optimizer=min(1.0, max(0.0, share)))

    def _with_pipeline(self, layout: FoldedLayout, draw: Generator) -> FoldedLayout | None:
        """Return a layout with other stages a rank, or another schedule."""
        if layout.pp == 1 or self.pins.stages is not None:
            return None
        vpp, schedule = _one_of([*self.space.schedules(self.pins, layout.pp)], draw)
        return layout.changed(vpp=vpp, schedule=schedule, stages=None)


def _ordered(modules: set[Recompute]) -> tuple[Recompute, ...]:
    """Return modules in the order of `RECOMPUTES`, without those that another one repeats."""
    if "moe" in modules:
        modules = modules - _REPEATED_BY_MOE
    return tuple(one for one in RECOMPUTES if one in modules)


def _one_of(every: Sequence[T], draw: Generator) -> T:
    return every[int(draw.integers(len(every)))]


def _beside(value: int, ascending: Sequence[int], draw: Generator) -> int | None:
    """Return the next smaller or larger one; None where there is none."""
    below = [one for one in ascending if one < value][-1:]
    above = [one for one in ascending if one > value][:1]
    return _one_of([*below, *above], draw) if below or above else None
