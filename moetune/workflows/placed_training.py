"""A decoder's layout with its experts placed by the loads of each layer, where that is worth it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from moetune.domain.errors import InputError
from moetune.domain.placement import LayerPlacement, ModelPlacement
from moetune.domain.recorded_layers import RecordedLayers
from moetune.solve.joint.best import BestLayouts
from moetune.solve.joint.placed_layers import PlacedLayers
from moetune.solve.joint.placement import (
    choice_of,
    kept,
    natural_words,
    placing,
    unplaceable,
)
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import PricedLayout
from moetune.workflows.training_plan import TrainingRequest

_FLAG = "--expert-placement"


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedTraining:
    """The best layout found for a request, of which others can be asked for.

    Args:
        layouts: as far as they are asked for.
    """

    request: TrainingRequest
    search: FoldedSearch
    best: PricedLayout
    layouts: BestLayouts

    @property
    def seconds(self) -> float | None:
        """The best one's step; None where none fits."""
        return self.best.step.seconds if self.search.fits(self.best.layout) else None

    def placements(self, layers: PlacedLayers) -> tuple[LayerPlacement, ...]:
        """Return where the experts of some layers are in the best layout."""
        return layers.placements(self.best.layout.ep)


Opened: TypeAlias = Callable[[TrainingRequest], tuple[FoldedSearch, BestLayouts]]
"""Returns the search of a request, with nothing found yet."""


def placed_request(request: TrainingRequest) -> TrainingRequest:
    """Return the question for layouts with placed experts alone.

    Args:
        request: with a record of each layer.
    """
    routing = request.job.routing
    assert isinstance(routing, RecordedLayers)  # noqa: S101 - the caller has a record
    job = replace(request.job, routing=PlacedLayers.of(routing))
    return replace(request, job=job, target=placing(request.target))


def check_placement_rule(request: TrainingRequest) -> None:
    """Raise InputError where a rule for the experts' placement has nothing to go by."""
    rule, target = request.pins.expert_placement, request.target
    if rule is None:
        return
    if not isinstance(request.job.routing, RecordedLayers):
        raise InputError(
            f"{_FLAG} {rule} needs loads of each layer's experts: without them none is placed",
            f"omit {_FLAG}, or give the record of the model's routing with --routing",
        )
    if rule != "natural" and not target.places_experts:
        raise InputError(
            f"{_FLAG} {rule}: {target.name} keeps experts in their own order",
            f"omit {_FLAG}, or plan with --target moetune",
        )


def solve_placed(
    request: TrainingRequest, opened: Opened
) -> tuple[SolvedTraining, ModelPlacement | None]:
    """Return the best layouts, with experts placed where that saves enough of the step.

    In the natural order and placed, each is the best of its own search: what balances ranks may
    make more of them worth while. Placed experts are whole, and not
    sharded by FSDP2. Without a record of each layer, or with the natural order pinned, nothing is
    placed.

    Raises:
        InputError: the pins break a rule.
        ProfileError: the profile lacks an operation.
    """
    natural = _best(request, opened)
    if not isinstance(request.job.routing, RecordedLayers):
        return natural, None
    asked = placed_request(request)
    layers = asked.job.routing
    assert isinstance(layers, PlacedLayers)  # noqa: S101 - of `placed_request`
    fixed = _fixed(natural, layers)
    if fixed is not None:
        return natural, fixed
    return _placed_by_loads(natural, _best(asked, opened), layers)


def _best(request: TrainingRequest, opened: Opened) -> SolvedTraining:
    search, layouts = opened(request)
    return SolvedTraining(request=request, search=search, best=layouts.best(), layouts=layouts)


def _placed_by_loads(
    natural: SolvedTraining, placed: SolvedTraining, layers: PlacedLayers
) -> tuple[SolvedTraining, ModelPlacement]:
    """Return the better of the natural order and placed experts."""
    own = natural.placements(layers)
    if placed.seconds is None:
        return natural, kept(own, "no layout that places them fits", natural.seconds)
    choice = choice_of(
        placed.placements(layers), natural_step_seconds=natural.seconds,
        placed_step_seconds=placed.seconds,
    )  # fmt: skip
    if choice.is_taken:
        return placed, choice
    return natural, kept(own, choice.why, natural.seconds, placed.seconds)


def _fixed(natural: SolvedTraining, layers: PlacedLayers) -> ModelPlacement | None:
    """Return the natural order where nothing else may be, with the reason."""
    request = natural.request
    if request.pins.expert_placement == "natural":
        why = "as pinned"
    elif not request.target.places_experts:
        return _elsewhere(natural, layers)
    elif not (why := unplaceable(request.pins)):
        return None
    own = natural.placements(layers)
    return kept(own, f"{why}; {natural_words(own)}", natural.seconds)


def _elsewhere(natural: SolvedTraining, layers: PlacedLayers) -> ModelPlacement:
    """Return the natural order of a runtime that has no other, with what one would save."""
    target, layout = natural.request.target, natural.best.layout
    prices, _ = natural.search.of_wholes
    placed = replace(prices, job=replace(prices.job, routing=layers))
    choice = choice_of(
        natural.placements(layers), natural_step_seconds=natural.seconds,
        placed_step_seconds=placed.step(layout).seconds,
    )  # fmt: skip
    why = f"{target.name} places none, and placed ones would save less than the predictions' error"
    if choice.is_taken:
        why = f"{target.name} places none, and --target moetune does: {choice.why}"
    return kept(choice.layers, why, choice.natural_step_seconds, choice.placed_step_seconds)
