"""Placement of a model's experts, where the plan's own step gains enough by it."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType

from moetune.domain.model_placement import LayerPlacement, ModelPlacement
from moetune.domain.targets import Target
from moetune.domain.training import LayoutRequest, ZeroStage
from moetune.domain.units import format_share
from moetune.solve.layer.placed import WORTH_PLACING

_MOST_ZERO: ZeroStage = 1
"""Shards of experts (FSDP2), from stage 2 on, are in the order of the ranks."""


def placing(target: Target) -> Target:
    """Return the target with those of its layouts that can place experts.

    FSDP2 does not shard them, so that there is one replica of each.
    """
    zero = tuple(one for one in target.zero if one <= _MOST_ZERO)
    largest = MappingProxyType({**target.largest, "edp": 1})
    return replace(target, zero=zero, zero_with_pp=_MOST_ZERO, largest=largest)


def unplaceable(pins: LayoutRequest) -> str:
    """Return why no layout with these pins places experts; "" where one may."""
    if pins.zero is not None and pins.zero > _MOST_ZERO:
        return f"with ZeRO stage {pins.zero} their shards are in the order of the ranks"
    return ""


def natural_words(layers: Sequence[LayerPlacement]) -> str:
    """Return how full the fullest ranks are in the natural order."""
    mean = fmean(one.natural_skew for one in layers)
    return f"the fullest ranks have {mean:.2f} × the mean rows, the mean of {len(layers)} layers"


def choice_of(
    layers: Sequence[LayerPlacement],
    *,
    natural_step_seconds: float | None,
    placed_step_seconds: float,
) -> ModelPlacement:
    """Return the placement that a plan takes, or the natural order that it keeps, with the reason.

    Args:
        layers: as the best layout with placed experts has them.
        natural_step_seconds: of the best layout in the natural order; None where none fits.
        placed_step_seconds: of that with placed experts.
    """
    choice = ModelPlacement(
        layers=tuple(layers), natural_step_seconds=natural_step_seconds,
        placed_step_seconds=placed_step_seconds, why="",
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
    return kept(layers, why, natural_step_seconds, placed_step_seconds)


def kept(
    layers: Sequence[LayerPlacement],
    why: str,
    natural_step_seconds: float | None,
    placed_step_seconds: float | None = None,
) -> ModelPlacement:
    """Return the natural order.

    Args:
        layers: with the placement that is not taken.
    """
    return ModelPlacement(
        layers=tuple(replace(one, experts=()) for one in layers), why=why,
        natural_step_seconds=natural_step_seconds, placed_step_seconds=placed_step_seconds,
    )  # fmt: skip
