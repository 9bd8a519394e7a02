"""The error of predicted steps of a layer, by number of chunks."""

from dataclasses import dataclass, field, replace

import numpy as np

from moetune.domain.arrays import Floats, Sizes
from moetune.domain.samples import StepRecord

SHARED_OCTAVES = 3
"""At this distance in octaves, errors of two numbers of chunks are independent. One octave apart
they share 2/3 of their variance, and two octaves apart 1/3."""
SUSTAINED, GAP_SECONDS = 0.85, 15e-6
"""Share of published kernels' rates that kernels reach within a step, and seconds between GEMMs.
Kernels are published alone, with cold clocks. The numbers are the mean of the public runs of each
machine, from blocks of 2 k to 16 k columns. aiconfigurator's GEMMs of GB200 that ran long enough to
read their power (TensorRT-LLM 1.3.0rc17) reach 0.84 of the others' rate, and 0.81 in NVFP4."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepErrors:
    """log(measured / predicted) of a layer's phases, normally distributed at each octave of chunks.

    Args:
        mean: mean at 1, 2, 4 … chunks, from measured steps, shape (octaves,), or (refits, octaves)
            for several refits.
        roots: a square root of the covariance, shape (octaves, octaves).
        records: the measured steps behind the mean; empty if none was measured.
        gain: derivative of the mean by each record's residual, shape (octaves, records).
        gemm_factor, gap_seconds: in a step, factor on a GEMM's time alone, and seconds after it.
        shared: standard deviation of an error that all choices for a layer share.
    """

    mean: Floats = field(default_factory=lambda: np.zeros(1))
    roots: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    records: tuple[StepRecord, ...] = ()
    gain: Floats = field(default_factory=lambda: np.zeros((1, 0)))
    gemm_factor: float = 1.0
    gap_seconds: float = 0.0
    shared: float = 0.0

    def given(self, residuals: Floats) -> "StepErrors":
        """Return the errors for other residuals of the records, as under other costs.

        Args:
            residuals: shape (records,), or (refits, records).
        """
        recorded = [record.residual for record in self.records]
        return replace(self, mean=self.mean + (residuals - recorded) @ self.gain.T)

    def factor(self, degree: Sizes) -> Floats:
        """Return the expected ratio of measured to predicted time in `degree` chunks."""
        factors: Floats = np.exp(at_degree(self.mean, degree))
        return factors


def at_degree(octaves: Floats, degree: Sizes) -> Floats:
    """Return values at 1, 2, 4 … chunks, interpolated to a number of chunks or an array of them.

    Args:
        octaves: shape (…, octaves); the last octave also holds for more chunks.
    """
    last = octaves.shape[-1] - 1
    place = np.minimum(np.log2(degree), last)
    low = place.astype(int)
    share = place - low
    between: Floats = (1 - share) * octaves[..., low] + share * octaves[
        ..., np.minimum(low + 1, last)
    ]
    return between


NO_STEP_ERRORS = StepErrors()
"""Errors of predictions that are used without a correction."""
