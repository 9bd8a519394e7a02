"""A model's layouts with its experts placed by the loads of each layer, where that is worth it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType

from moetune.domain.once import once
from moetune.domain.placement import LayerPlacement, ModelPlacement
from moetune.domain.recorded_layers import RecordedLayers
from moetune.domain.targets import Target
from moetune.domain.training import LayoutRequest, TrainingJob, ZeroStage
from moetune.domain.units import format_share
from moetune.solve.joint.best import BestLayouts
from moetune.solve.joint.search import FoldedSearch, PricedLayout
from moetune.solve.layer.placed import WORTH_PLACING, least_fullest, place_experts
from moetune.solve.training.machine import Trusts


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


_MOST_ZERO: ZeroStage = 1
"""Shards of experts (FSDP2), from stage 2 on, are in the order of the ranks."""


def placing(target: Target) -> Target:
    """Return the target with those of its layouts that can place experts.

    FSDP2 does not shard them, so that there is one replica of each.
    """
    zero = tuple(one for one in target.zero if one <= _MOST_ZERO)
    largest = MappingProxyType({**target.largest, "edp": 1})
    return replace(target, zero=zero, zero_with_pp=_MOST_ZERO, largest=largest)


def placed_job(job: TrainingJob) -> TrainingJob:
    """Return a job whose layers were recorded with its experts placed."""
    assert isinstance(job.routing, RecordedLayers)  # noqa: S101 - the caller has a record
    return replace(job, routing=PlacedLayers.of(job.routing))


def solve_placed(
    search: FoldedSearch, pins: LayoutRequest
) -> tuple[BestLayouts, ModelPlacement | None]:
    """Return the best layouts, with experts placed where that saves enough of the step.

    In the natural order and placed, each is the best of its own search: what balances ranks may
    make more of them worth while. Placed experts are whole, and not sharded by FSDP2. Without a
    record of each layer, or with the natural order pinned, nothing is placed.

    Raises:
        InputError: the pins break a rule.
        ProfileError: the profile lacks an operation.
    """
    of_layouts = replace(pins, expert_placement=None)
    natural = BestLayouts.of(search, of_layouts)
    best, prices = natural.best(), search.wholes
    if not isinstance(prices.job.routing, RecordedLayers):
        return natural, None
    job = placed_job(prices.job)
    assert isinstance(job.routing, PlacedLayers)  # noqa: S101 - of `placed_job`
    layers, seconds = job.routing.placements(best.layout.ep), _seconds(search, best)
    if pins.expert_placement != "natural" and not search.target.places_experts:
        step = replace(prices, job=job).step(best.layout)
        return natural, _elsewhere(_choice(layers, seconds, step.seconds), search.target)
    if why := _unplaceable(pins):
        return natural, _kept(layers, f"{why}; {_natural_words(layers)}", seconds)
    device = replace(prices.device, trusts=Trusts())
    wholes = replace(prices, job=job, device=device, target=placing(search.target))
    placed = BestLayouts.of(replace(search, wholes=wholes), of_layouts)
    placed_seconds = _seconds(placed.search, placed.best())
    if placed_seconds is None:
        return natural, _kept(layers, "no layout that places them fits", seconds)
    choice = _choice(job.routing.placements(placed.best().layout.ep), seconds, placed_seconds)
    if choice.is_taken:
        return placed, choice
    return natural, _kept(layers, choice.why, seconds, placed_seconds)


def _seconds(search: FoldedSearch, best: PricedLayout) -> float | None:
    """Return the seconds of a step; None where it does not fit."""
    return best.step.seconds if search.fits(best.layout) else None


def _unplaceable(pins: LayoutRequest) -> str:
    """Return why no layout with these pins places experts; "" where one may."""
    if pins.expert_placement == "natural":
        return "as pinned"
    if pins.zero is not None and pins.zero > _MOST_ZERO:
        return f"with ZeRO stage {pins.zero} their shards are in the order of the ranks"
    return ""


def _natural_words(layers: Sequence[LayerPlacement]) -> str:
    """Return how full the fullest ranks are in the natural order."""
    mean = fmean(one.natural_skew for one in layers)
    return f"the fullest ranks have {mean:.2f} × the mean rows, the mean of {len(layers)} layers"


def _elsewhere(choice: ModelPlacement, target: Target) -> ModelPlacement:
    """Return the natural order of a runtime that has no other, with what one would save."""
    why = f"{target.name} places none, and placed ones would save less than the predictions' error"
    if choice.is_taken:
        why = f"{target.name} places none, and --target moetune does: {choice.why}"
    return _kept(choice.layers, why, choice.natural_step_seconds, choice.placed_step_seconds)


def _choice(
    layers: Sequence[LayerPlacement], natural_seconds: float | None, placed_seconds: float
) -> ModelPlacement:
    """Return the placement that a plan takes, or the natural order that it keeps, with the reason.

    Args:
        layers: as the best layout with placed experts has them.
        natural_seconds: of the best layout in the natural order; None where none fits.
        placed_seconds: of that with placed experts.
    """
    choice = ModelPlacement(
        layers=tuple(layers), natural_step_seconds=natural_seconds,
        placed_step_seconds=placed_seconds, why="",
    )  # fmt: skip
    after, before = (
        f"{fmean(getattr(one, name) for one in layers):.2f}"
        for name in ("placed_skew", "natural_skew")
    )
    if choice.gain is None:
        why = f"in their order they do not fit: the fullest ranks have {before} × the mean rows"
        return replace(choice, why=why)
    gain = format_share(choice.gain)
    if choice.gain > WORTH_PLACING:
        why = (
            f"the fullest ranks have {after} × the mean rows, the mean of {len(layers)} layers, "
            f"instead of {before}, saving {gain} of the step"
        )
        return replace(choice, why=why)
    least = format_share(WORTH_PLACING, digits=0)
    why = f"placed ones save {gain} of the step: less than {least} is within the predictions' error"
    return _kept(layers, why, natural_seconds, placed_seconds)


def _kept(
    layers: Sequence[LayerPlacement],
    why: str,
    natural_seconds: float | None,
    placed_seconds: float | None = None,
) -> ModelPlacement:
    """Return the natural order.

    Args:
        layers: with the placement that is not taken.
    """
    return ModelPlacement(
        layers=tuple(replace(one, experts=()) for one in layers), why=why,
        natural_step_seconds=natural_seconds, placed_step_seconds=placed_seconds,
    )  # fmt: skip
