"""A model's layouts with its experts placed by the loads of each layer, where that is worth it."""

from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType

from moetune.domain.once import once
from moetune.domain.placement import LayerPlacement, ModelPlacement
from moetune.domain.routing_record import RecordedLayers
from moetune.domain.targets import Target
from moetune.domain.training import LayoutRequest, TrainingJob, ZeroStage
from moetune.domain.units import format_share
from moetune.solve.layer.placed import WORTH_PLACING, least_fullest, place_experts
from moetune.solve.model.best import BestLayouts
from moetune.solve.model.machine import Trusts
from moetune.solve.model.search import FoldedSearch, PricedLayout


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
"""Shards of experts (FSDP2), from stage 2 on, are in the order of the ranks."""


def placing(target: Target) -> Target:
    """Return the target with layouts that can place experts, of which FSDP2 shards none."""
    zero = tuple(stage for stage in target.zero if stage <= _MOST_ZERO)
    largest = MappingProxyType({**target.largest, "edp": 1})
    return replace(target, zero=zero, zero_with_pp=_MOST_ZERO, largest=largest)


def placed_job(job: TrainingJob) -> TrainingJob:
    """Return a job whose layers were recorded with its experts placed."""
    assert isinstance(job.routing, RecordedLayers)  # noqa: S101 - the caller has a record
    return replace(job, routing=PlacedLayers.of(job.routing))


def solve_placed(search: FoldedSearch, pins: LayoutRequest) -> tuple[BestLayouts, ModelPlacement]:
    """Return the best layouts of recorded layers, their experts placed where that saves enough.

    In the natural order and placed, each is the best of its own search: what balances ranks may
    make more of them worth while. Placed experts are whole, and not sharded by FSDP2. Without a
    record of each layer, or with the natural order pinned, nothing is placed.

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
        return natural, _unplaced(choice, "as pinned")
    if not search.target.places_experts:
        step = replace(prices, job=job).step(best.layout)
        choice = _judged(replace(choice, placed_step_seconds=step.seconds))
        would = "placed ones would save less than the predictions' error"
        if choice.is_taken:
            would = f"--target moetune does: {choice.why}"
        return natural, _keep_natural(choice, f"{search.target.name} places none, and {would}")
    if (pins.zero or 0) > _MOST_ZERO:
        why = f"with ZeRO stage {pins.zero} their shards are in the order of the ranks"
        return natural, _unplaced(choice, why)
    device = replace(prices.device, trusts=Trusts())
    wholes = replace(prices, job=job, device=device, target=placing(search.target))
    placed = BestLayouts.of(replace(search, wholes=wholes), of_layouts)
    layers = job.routing.placements(placed.best().layout.ep)
    seconds = _seconds(placed.search, placed.best())
    if seconds is None:
        return natural, _keep_natural(choice, "no layout that places them fits")
    choice = _judged(replace(choice, layers=layers, placed_step_seconds=seconds))
    return placed if choice.is_taken else natural, choice


def _unplaced(choice: ModelPlacement, why: str) -> ModelPlacement:
    """Return the natural order that nothing was tried against, with how full its ranks are."""
    mean = f"the mean rows, the mean of {len(choice.layers)} layers"
    return _keep_natural(
        choice, f"{why}; the fullest ranks have {_mean(choice, 'natural_skew')} × {mean}"
    )


def _seconds(search: FoldedSearch, best: PricedLayout) -> float | None:
    """Return the seconds of a step; None where it does not fit."""
    return best.step.seconds if search.fits(best.layout) else None


def _mean(choice: ModelPlacement, name: str) -> str:
    """Return how full the fullest ranks are on the mean of the layers."""
    return f"{fmean(getattr(layer, name) for layer in choice.layers):.2f}"


def _judged(choice: ModelPlacement) -> ModelPlacement:
    """Return the placement that a plan takes, or the natural order that it keeps, and why."""
    before, rows = _mean(choice, "natural_skew"), "× the mean rows"
    if choice.gain is None:
        why = f"in their order they do not fit: the fullest ranks have {before} {rows}"
        return replace(choice, why=why)
    gain = format_share(choice.gain)
    if choice.gain > WORTH_PLACING:
        why = (
            f"the fullest ranks have {_mean(choice, 'placed_skew')} {rows}, the mean of "
            f"{len(choice.layers)} layers, instead of {before}, saving {gain} of the step"
        )
        return replace(choice, why=why)
    least = format_share(WORTH_PLACING, digits=0)
    why = f"placed ones save {gain} of the step: less than {least} is within the predictions' error"
    return _keep_natural(choice, why)


def _keep_natural(choice: ModelPlacement, why: str) -> ModelPlacement:
    """Return the natural order, with the reason."""
    return replace(
        choice, layers=tuple(replace(layer, experts=()) for layer in choice.layers), why=why
    )
