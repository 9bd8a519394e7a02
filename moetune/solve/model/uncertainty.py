"""Errors of a training plan's step, and confidence in its choice.

The errors are those of public runs (docs/results/public-runs.md, which prints them): the logarithm
of measured over predicted seconds. Runs of one set share a model, a machine and a release, and most
of their error. The rest of the error is independent between layouts of a set. If operations stand
in for others, the step is also priced under drawn costs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from moetune.domain.plan import Confidence
from moetune.domain.records import Calibration
from moetune.domain.targets import TargetName

if TYPE_CHECKING:  # only for types: imports go in one direction
    from moetune.solve.model.search import PricedLayout
    from moetune.solve.model.step import StepPrices

P05_RATIO, P95_RATIO = 0.85, 1.41
"""Quantiles of measured over predicted seconds of Megatron and Bridge, each set of runs counted
once; moetune's runtime takes them as well."""
_RATIOS: Mapping[TargetName, tuple[float, float]] = {
    "torchtitan": (0.75, 1.46),
    # No published steps state the batch: torchtitan's logarithms, twice as wide.
    "transformers": (0.56, 2.2),
    "deepspeed": (0.56, 2.2),
}
RECORDED: Mapping[TargetName, str] = {"torchtitan": "torchtitan"}
"""Runtimes with recorded runs, by the target that takes their quantiles; others take Megatron's."""
UNRECORDED: frozenset[TargetName] = frozenset({"transformers", "deepspeed"})
"""Targets without any published steps that state the batch."""
LAYOUT_SPREAD = 0.04
"""Spread of the logarithm between layouts of a set: 1.4826 times the median deviation."""
_WIDTH, _POINTS = 5.0, 400


def public_ratios(target: TargetName) -> tuple[float, float]:
    """Return the 5 % and 95 % quantiles of measured over predicted seconds under a runtime."""
    return _RATIOS.get(target, (P05_RATIO, P95_RATIO))


def confidence_of(
    seconds: Sequence[float],
    *,
    layout_spread: float = LAYOUT_SPREAD,
    ratios: tuple[float, float] = (1.0, 1.0),
    target: TargetName = "megatron",
    calibration: Calibration | None = None,
) -> Confidence:
    """Return the confidence that the first of these steps is the fastest, and its range.

        P = ∫ f(x) S(x) dx,  E = ∫ f(x) ∫ (1 − S(m)) exp(x − m) dm dx, m < x

    f is the density of the first step's logarithm, and S the chance that all others are slower.
    Each step has an independent error; the error that all share changes neither.

    Args:
        seconds: predicted steps of the choice and of the layouts that it was compared with.
        ratios: range of the step over its prediction from errors that the record lacks. They are
            independent of the record's, so logarithms add up in squares.
        calibration: its range replaces the record's.
    """
    factor, (low, high) = 1.0, public_ratios(target)
    if calibration is not None:
        factor, low, high = calibration.factor, calibration.low_factor, calibration.high_factor
    first = NormalDist(math.log(seconds[0]), layout_spread)
    rivals = [NormalDist(math.log(step), layout_spread) for step in seconds[1:]]
    start = min(math.log(step) for step in seconds) - _WIDTH * layout_spread
    end = first.mean + _WIDTH * layout_spread
    pace = (end - start) / _POINTS
    best = regret = lost = 0.0
    for point in range(_POINTS):
        x = start + (point + 0.5) * pace
        slower = math.prod(1.0 - rival.cdf(x) for rival in rivals)
        lost += (1.0 - slower) * math.exp(-x) * pace
        weight = first.pdf(x) * pace
        best += weight * slower
        regret += weight * math.exp(x) * lost
    return Confidence(
        probability_best=min(1.0, best),
        expected_regret=regret,
        p05_step_seconds=factor * seconds[0] / _both(factor / low, 1 / min(ratios[0], 1.0)),
        p95_step_seconds=factor * seconds[0] * _both(high / factor, max(ratios[1], 1.0)),
    )


def drawn_ratios(drawn: Iterable["StepPrices"], chosen: "PricedLayout") -> tuple[float, float]:
    """Return the 5 % and 95 % quantiles of a layout's step under drawn prices, over nominal."""
    seconds = [prices.step(chosen.layout).seconds for prices in drawn]
    low, high = np.quantile(np.array(seconds) / chosen.step.seconds, (0.05, 0.95))
    return float(low), float(high)


def _both(first: float, second: float) -> float:
    """Return the combined factor of two independent factors, each at least 1."""
    return math.exp(math.hypot(math.log(first), math.log(second)))
