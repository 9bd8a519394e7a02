"""A model's layouts with experts placed by the loads of each layer, if that is worth it."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from moetune.domain.once import once
from moetune.domain.placement import LayerPlacement, ModelPlacement
from moetune.domain.routing_record import RecordedLayers
from moetune.domain.targets import Target
from moetune.domain.training import LayoutRequest, TrainingJob, ZeroStage
from moetune.solve.layer.placed import WORTH_PLACING, least_fullest, place_experts
from moetune.solve.model.best import BestLayouts
from moetune.solve.model.machine import Trusts
from moetune.solve.model.search import FoldedSearch, PricedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedLayers(RecordedLayers):
    """Layers whose experts are placed by their loads, if that beats the natural order."""

    @classmethod
    def of(cls, natural: RecordedLayers) -> "PlacedLayers":
        """Return the layers with their experts placed."""
        return cls(name=natural.name, layers=natural.layers)

    def fullest(self, layer: int, ep: int) -> float:
        """Return the rows of a layer's fullest rank over the mean."""
        return self.placement(layer, ep).placed_skew

    def fullest_at_least(self, layer: int, ep: int) -> float:
        """Return a lower bound on `fullest`, without placing any experts."""
        least = 1.0 if ep == 1 else least_fullest(self._shares(layer), ep) * ep
        return min(self.layers[layer].fullest(ep), least)

    def placements(self, ep: int) -> tuple[LayerPlacement, ...]:
        """Return the placement of every layer on ep ranks."""
        return tuple(self.placement(layer, ep) for layer in range(len(self.layers)))

    @once(lambda layer, ep: (layer, ep))
    def placement(self, layer: int, ep: int) -> LayerPlacement:
        """Return the placement of a layer on ep ranks."""
        return place_experts(self._shares(layer), ep, natural_skew=self.layers[layer].fullest(ep))

    def _shares(self, layer: int) -> tuple[float, ...]:
        recorded = self.layers[layer]
        shares = recorded.loads.shares(recorded.top_k)
        assert shares is not None  # noqa: S101 - records have loads of single experts
        return shares


_MOST_ZERO: ZeroStage = 1
"""Highest ZeRO stage that can place experts; above it FSDP2 shards them in order of ranks."""


def placing(target: Target) -> Target:
    """Return the target limited to layouts that can place experts: FSDP2 shards no experts."""
    zero = tuple(stage for stage in target.zero if stage <= _MOST_ZERO)
    largest = MappingProxyType({**target.largest, "edp": 1})
    return replace(target, zero=zero, zero_with_pp=_MOST_ZERO, largest=largest)


def placed_job(job: TrainingJob) -> TrainingJob:
    """Return the job with the experts of its recorded layers placed."""
    assert isinstance(job.routing, RecordedLayers)  # noqa: S101 - the caller has a record
    return replace(job, routing=PlacedLayers.of(job.routing))


Untried = Literal["", "pinned", "target", "zero", "memory"]
"""Reason not to try placed experts: pins, the target, the ZeRO stage, or memory."""


class PlacedLayouts(NamedTuple):
    """The best layouts with their placement, whose reasons are still empty."""

    layouts: BestLayouts
    placement: ModelPlacement
    untried: Untried = ""


def solve_placed(search: FoldedSearch, pins: LayoutRequest) -> PlacedLayouts:
    """Return the best layouts of recorded layers, with placed experts if that saves enough.

    The natural order and placed experts are searched separately, because balanced ranks may favour
    other layouts. Placed experts are whole, and not sharded by FSDP2. Nothing is placed without a
    record of each layer, or if the natural order is pinned.

    Raises:
        InputError: the pins break a rule.
        ProfileError: the profile lacks an operation.
    """
    of_layouts, prices = replace(pins, expert_placement=None), search.wholes
    natural = BestLayouts.of(search, of_layouts)
    best, job = natural.best(), placed_job(prices.job)
    assert isinstance(job.routing, PlacedLayers)  # noqa: S101 - of `placed_job`
    choice = ModelPlacement(
        layers=job.routing.placements(best.layout.ep), why="", placed_step_seconds=None,
        natural_step_seconds=_seconds(search, best),
    )  # fmt: skip
    if pins.expert_placement == "natural":
        return PlacedLayouts(natural, _in_order(choice), "pinned")
    if not search.target.places_experts:
        step = replace(prices, job=job).step(best.layout)
        choice = replace(choice, placed_step_seconds=step.seconds)
        return PlacedLayouts(natural, _in_order(choice), "target")
    if (pins.zero or 0) > _MOST_ZERO:
        return PlacedLayouts(natural, _in_order(choice), "zero")
    device = replace(prices.device, trusts=Trusts())
    wholes = replace(prices, job=job, device=device, target=placing(search.target))
    placed = BestLayouts.of(replace(search, wholes=wholes), of_layouts)
    layers = job.routing.placements(placed.best().layout.ep)
    seconds = _seconds(placed.search, placed.best())
    if seconds is None:
        return PlacedLayouts(natural, _in_order(choice), "memory")
    choice = replace(choice, layers=layers, placed_step_seconds=seconds)
    if not is_worth_placing(choice):
        return PlacedLayouts(natural, _in_order(choice))
    return PlacedLayouts(placed if choice.is_taken else natural, choice)


def _seconds(search: FoldedSearch, best: PricedLayout) -> float | None:
    """Return the seconds of a layout's step; None if it does not fit."""
    return best.step.seconds if search.fits(best.layout) else None


def is_worth_placing(choice: ModelPlacement) -> bool:
    """Return whether placed experts save more than the prediction error, or only they fit."""
    return choice.gain is None or choice.gain > WORTH_PLACING


def _in_order(choice: ModelPlacement) -> ModelPlacement:
    """Return the choice with the natural order of the experts."""
    layers = tuple(replace(layer, experts=()) for layer in choice.layers)
    return replace(choice, layers=layers)
