"""The factor between predicted and measured steps, from the observed runs.

    log(measured / predicted) = m + d(model, decisions) + e(run),  m, d and e normal around 0

m belongs to the machine and the runtime, d to a model and a run's decisions, and e to a single run.
Two runs share less of d the more decisions differ: exp(−n / 10). Together they spread as public
runs of the runtime do, in the shares most likely given these runs (docs/results/calibration.md).
The expectation of another run is the regression on observed runs. It shrinks towards a factor of 1
if they are few or far:

    E = k·(K + σ²I)⁻¹·y,  V = k₀ + σ² − k·(K + σ²I)⁻¹·k
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moetune.domain.records import Calibration, ObservedRun
from moetune.domain.targets import Target, TargetName
from moetune.solve.model.uncertainty import public_ratios

MACHINE_SHARE, MODEL_SHARE, RUN_SHARE = 0.15, 0.75, 0.1
"""Shares of m, d and e in the variance."""
FAR_DECISIONS = 10.0
"""Differing words at which two runs of a model share 1/e of d; a changed value is two words."""
FARTHEST = 3.0
"""Runs with a ratio above it, or below its inverse, cannot be runs of the predicted layout."""


class Decided(NamedTuple):
    """The model of a run and its decisions, in words."""

    model: str
    decisions: frozenset[str]


def calibration_of(
    runs: Iterable[ObservedRun], *, of: Decided, target: Target
) -> Calibration | None:
    """Return the calibration by the newest run of each question and layout under a runtime.

    None without any run of this runtime version.
    """
    version = target.name, target.number
    same = [run for run in runs if (run.target, run.target_version) == version]
    newest = {run.what: run for run in reversed(same)}
    near = [run for run in newest.values() if 1 / FARTHEST <= run.ratio <= FARTHEST]
    if not near:
        return None
    places, logs = [decided(run) for run in near], [math.log(run.ratio) for run in near]
    mean, spread = expected(places, logs, of=of, target=target.name)
    return Calibration(
        factor=math.exp(mean), low_factor=math.exp(mean - spread),
        high_factor=math.exp(mean + spread), num_runs=len(near),
        num_of_model=sum(place.model == of.model for place in places),
        num_left_out=len(newest) - len(near),
    )  # fmt: skip


def decided(run: ObservedRun) -> Decided:
    """Return an observed run's model and decisions."""
    return Decided(run.model, run.decisions)


def expected(
    places: Sequence[Decided], logs: Sequence[float], *, of: Decided, target: TargetName
) -> tuple[float, float]:
    """Return the expected logarithm of a run's ratio, and half of its 90 % range."""
    covariance = _covariance([*places, of])
    observed, shared = covariance[:-1, :-1], covariance[-1, :-1]
    weights = np.linalg.solve(observed + RUN_SHARE * np.eye(len(places)), shared)
    left = MACHINE_SHARE + MODEL_SHARE + RUN_SHARE - float(weights @ shared)
    return float(weights @ np.array(logs)), public_half_range(target) * math.sqrt(left)


def _covariance(places: Sequence[Decided]) -> NDArray[np.float64]:
    """Return the shares of the variance that each pair of runs has in common."""
    models = np.array([place.model for place in places])
    words = sorted(frozenset[str]().union(*(place.decisions for place in places)))
    has = np.array([[word in place.decisions for word in words] for place in places], float)
    num_only_first = has @ (1 - has).T
    near: NDArray[np.float64] = np.exp(-(num_only_first + num_only_first.T) / FAR_DECISIONS)
    near[models[:, None] != models] = 0.0
    return MACHINE_SHARE + MODEL_SHARE * near


def public_half_range(target: TargetName) -> float:
    """Return half the logarithmic range around 1 in which public runs of a runtime lie."""
    low, high = public_ratios(target)
    return math.hypot(math.log(low), math.log(high)) / math.sqrt(2)
