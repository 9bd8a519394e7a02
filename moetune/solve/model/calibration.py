"""The factor between predicted and measured steps, from the runs that were observed.

    log(measured / predicted) = m + d(model) + e(run),  m, d and e normal around 0

m is of the machine and the runtime, d of a model on them, and e of a single run. Together they
spread as public runs of the runtime do, in shares that are most likely in the record of these
(docs/results/calibration.md). What is expected of another run is the regression on the observed
ones, which shrinks towards a factor of 1 where they are few:

    E = k·(K + σ²I)⁻¹·y,  V = k₀ + σ² − k·(K + σ²I)⁻¹·k
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from moetune.domain.records import Calibration, ObservedRun
from moetune.domain.targets import TargetName
from moetune.solve.model.uncertainty import public_ratios

MACHINE_SHARE, MODEL_SHARE, RUN_SHARE = 0.2, 0.4, 0.4
"""Shares of m, d and e in the variance."""
FARTHEST = 3.0
"""Runs whose ratio is above it, or below its inverse, are not of what was predicted."""


def calibration_of(
    runs: Iterable[ObservedRun], *, model: str, target: TargetName
) -> Calibration | None:
    """Return the calibration by the newest run of each question and layout; None without any."""
    newest = {run.what: run for run in reversed([*runs])}
    near = [run for run in newest.values() if 1 / FARTHEST <= run.ratio <= FARTHEST]
    if not near:
        return None
    models, logs = [run.model for run in near], [math.log(run.ratio) for run in near]
    mean, spread = expected(models, logs, model=model, target=target)
    return Calibration(
        factor=math.exp(mean), low_factor=math.exp(mean - spread),
        high_factor=math.exp(mean + spread), num_runs=len(near), num_of_model=models.count(model),
        num_left_out=len(newest) - len(near),
    )  # fmt: skip


def expected(
    models: Sequence[str], logs: Sequence[float], *, model: str, target: TargetName
) -> tuple[float, float]:
    """Return the expected logarithm of a run of a model, and half the range of nine in ten."""
    names = np.array(models)
    observed = MACHINE_SHARE + MODEL_SHARE * (names[:, None] == names)
    shared = MACHINE_SHARE + MODEL_SHARE * (names == model)
    weights = np.linalg.solve(observed + RUN_SHARE * np.eye(len(names)), shared)
    left = MACHINE_SHARE + MODEL_SHARE + RUN_SHARE - float(weights @ shared)
    return float(weights @ np.array(logs)), public_half_range(target) * math.sqrt(left)


def public_half_range(target: TargetName) -> float:
    """Return half the logarithmic range around 1 that public runs of a runtime spread over."""
    low, high = public_ratios(target)
    return math.hypot(math.log(low), math.log(high)) / math.sqrt(2)
