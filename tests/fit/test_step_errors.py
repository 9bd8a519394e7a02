"""Errors of steps from those that were measured: conditioning a joint normal distribution."""

import math
from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.arrays import Floats
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.samples import GemmPoint, Sample, StepRecord
from moetune.domain.step_errors import StepErrors
from moetune.fit.step_errors import (
    DRIFT,
    LARGEST_BUSY,
    LARGEST_SEEN,
    NOISE,
    NUM_OCTAVES,
    OTHER_LAYER,
    TOKEN_OCTAVES,
    MachineErrors,
    drift_of,
)

LAYER = LayerShape(d_model=64, d_hidden=128, num_experts=4)
LOAD = Workload(layer=LAYER, world_size=2, tokens_per_rank=512)
SPREAD = 0.1


def record(
    degree: int, residual: float, *, tokens: int = 512, layer: LayerShape = LAYER
) -> StepRecord:
    return StepRecord(
        workload=replace(LOAD, layer=layer, tokens_per_rank=tokens), degree=degree,
        chunks_seconds=2.0, overhead_seconds=0.5, measured_seconds=2 * math.exp(residual) + 0.5,
    )  # fmt: skip


def errors(*records: StepRecord, tokens: int = 512) -> StepErrors:
    return MachineErrors(records=records, spread=SPREAD).of(LOAD.key, tokens)


def covariance(errors: StepErrors) -> Floats:
    made: Floats = errors.roots @ errors.roots.T
    return made


def test_the_distribution_is_the_joint_given_what_was_measured() -> None:
    """The oracle inverts the joint covariance of steps to predict and of measured ones."""
    other = replace(LAYER, activation="relu")
    records = [record(1, 0.1), record(4, -0.05, tokens=2048), record(16, 0.02, layer=other)]
    predicted = errors(*records, tokens=1024)
    places = [(2.0**octave, 1024, LAYER) for octave in range(NUM_OCTAVES)]
    places += [(rec.degree, rec.workload.tokens_per_rank, rec.workload.layer) for rec in records]
    joint = np.empty((len(places), len(places)))
    for row, (degree, tokens, layer) in enumerate(places):
        for column, (second, size, shape) in enumerate(places):
            near = max(1 - abs(math.log2(degree / second)) / 3, 0.0)
            near *= math.exp(-abs(math.log2(tokens / size)) / TOKEN_OCTAVES)
            joint[row, column] = SPREAD**2 * near * (1.0 if layer == shape else OTHER_LAYER)
    joint[NUM_OCTAVES:, NUM_OCTAVES:] += NOISE**2 * np.eye(len(records))
    precision = np.linalg.inv(joint)
    wanted = np.linalg.inv(precision[:NUM_OCTAVES, :NUM_OCTAVES])
    seen = [rec.residual for rec in records]
    mean = -wanted @ precision[:NUM_OCTAVES, NUM_OCTAVES:] @ seen
    assert predicted.mean == pytest.approx(mean.tolist())
    assert covariance(predicted) == pytest.approx(wanted + DRIFT**2)


def test_one_wild_step_was_disturbed_and_three_alike_are_the_machine() -> None:
    wild = math.log(errors(record(1, 0.01), record(4, 0.02), record(16, 0.9)).factor(16))
    assert wild < 0.2
    busy = errors(record(1, 0.88), record(4, 0.9), record(16, 0.93))
    for degree in (1, 4, 16):
        assert math.log(busy.factor(degree)) == pytest.approx(0.9, abs=0.06)


def test_layers_whose_ranks_share_experts_otherwise_tell_nothing() -> None:
    load = replace(LOAD, expert_parallel="tensor")
    measured = replace(record(1, 0.3), workload=load)
    assert errors(measured).factor(1) == 1.0
    half = math.log(errors(record(1, 0.2, layer=replace(LAYER, d_hidden=256))).factor(1))
    assert half == pytest.approx(0.5 * 0.2, abs=0.01)


def test_other_residuals_give_another_mean_and_the_same_spread() -> None:
    first = errors(record(1, 0.1), record(8, 0.2))
    again = first.given(np.array([0.1, 0.2]))
    assert again.mean == pytest.approx(first.mean)
    assert first.given(np.zeros(2)).roots is first.roots
    slower = errors(record(1, 0.1)).given(np.array([0.1 - 0.7]))
    assert math.log(slower.factor(1) / errors(record(1, 0.1)).factor(1)) == pytest.approx(
        -0.7, rel=1e-3
    )


def test_a_residual_is_of_the_chunks_unless_the_overhead_is_most_of_the_step() -> None:
    assert record(1, 0.25).residual == pytest.approx(0.25)
    odd = replace(record(1, 0.0), overhead_seconds=3.0, measured_seconds=4.0)
    assert odd.residual == pytest.approx(math.log(4.0 / 5.0))


def visits(*factors: float) -> list[Sample]:
    """Ten points, each visited with those factors on its time."""
    return [
        Sample(
            point=GemmPoint(dtype="float32", rows=rows, d_in=8, d_out=8),
            seconds=(1e-3 * rows * factor,) * 3,
        )
        for rows in range(1, 11)
        for factor in factors
    ]


def _drift(seen: float) -> float:
    """Half of the variance is the visits', half the record's."""
    return math.sqrt((seen**2 + DRIFT**2) / 2)


def test_the_drift_is_that_of_a_machines_visits() -> None:
    assert drift_of(visits(1.0, 1.0, 1.0)) == _drift(0.0)
    assert drift_of(visits(1.0, 1.0, 1.1)) == pytest.approx(_drift(math.log(1.1) / 1.645))
    assert drift_of(visits(1.0, 1.0, 9.0)) == _drift(LARGEST_SEEN)
    assert drift_of(visits(1.0)) == drift_of(visits(1.0, 1.5)[:4]) == DRIFT


def test_visits_during_other_programs_are_no_drift_of_the_machine() -> None:
    marked = [
        replace(visit, marks=("busy",)) if visit.median_seconds > 1e-3 * visit.point.rows else visit  # type: ignore[union-attr]  # GEMMs
        for visit in visits(1.0, 1.0, 1.5)
    ]
    assert drift_of(marked) == _drift(0.0)
    assert drift_of([replace(visit, marks=("busy",)) for visit in marked]) > _drift(0.0)


def test_a_machine_that_was_busy_most_of_the_time_stays_so() -> None:
    marked = [replace(visit, marks=("busy",)) for visit in visits(1.0, 1.1, 1.6)]
    assert drift_of(marked) == pytest.approx(math.log(1.6 / 1.05) / 1.645, rel=0.05)
    assert drift_of([replace(v, seconds=(1e-9, *v.seconds)) for v in marked]) == LARGEST_BUSY
    few = [*marked[:3], *visits(1.0, 1.1, 1.6)[3:]]
    assert drift_of(few) <= _drift(LARGEST_SEEN)


def test_the_drift_is_that_of_the_long_gemms() -> None:
    long, short = visits(1.0, 1.0, 1.02)[-6:], visits(1.0, 1.0, 1.0, 1.9)[:8]
    assert drift_of(long + short) == pytest.approx(_drift(math.log(1.02) / 1.645))
