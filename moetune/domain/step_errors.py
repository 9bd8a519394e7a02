"""The error of predicted steps of a layer, by number of chunks."""

from dataclasses import dataclass, field, replace

import numpy as np

from moetune.domain.arrays import Floats, Sizes
from moetune.domain.samples import StepRecord

SHARED_OCTAVES = 3
"""Octaves from which on the errors of two numbers of chunks have nothing in common. One octave
apart they share 2/3 of their variance, and two octaves apart 1/3."""
SUSTAINED, GAP_SECONDS = 0.85, 15e-6
"""Of published kernels' rates, alone and with cold clocks, that they reach in a step, and what is
between GEMMs: on the mean of the public runs of each machine, from blocks of 2 k to 16 k columns.
aiconfigurator's GEMMs of GB200 that ran long enough for their power to be read (TensorRT-LLM
1.3.0rc17) reach 0.84 of those that did not in bfloat16 and 8 bits, and 0.81 in NVFP4."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepErrors:
    """log(measured / predicted) of a layer's phases, a normal deviate for each octave of chunks.

    Args:
        mean: at 1, 2, 4 … chunks, as measured steps have shown it, shape (octaves,), or (refits,
            octaves) of several refits.
        roots: a square root of the covariance around it, shape (octaves, octaves).
        records: the steps behind it; empty where none was measured.
        gain: what the mean changes by where a record's residual does, shape (octaves, records).
        gemm_factor, gap_seconds: on the seconds of a GEMM alone within a step, and behind it.
        shared: standard deviation of an error that all choices for a layer have in common.
    """

    mean: Floats = field(default_factory=lambda: np.zeros(1))
    roots: Floats = field(default_factory=lambda: np.zeros((1, 1)))
    records: tuple[StepRecord, ...] = ()
    gain: Floats = field(default_factory=lambda: np.zeros((1, 0)))
    gemm_factor: float = 1.0
    gap_seconds: float = 0.0
    shared: float = 0.0

    def given(self, residuals: Floats) -> "StepErrors":
        """Return the errors where the records have other residuals, as under other costs.

        Args:
            residuals: shape (records,), or (refits, records).
        """
        recorded = [record.residual for record in self.records]
        return replace(self, mean=self.mean + (residuals - recorded) @ self.gain.T)

    def factor(self, degree: Sizes) -> Floats:
        """Return the expected ratio of measured to predicted time in so many chunks."""
        factors: Floats = np.exp(at_degree(self.mean, degree))
        return factors


def at_degree(octaves: Floats, degree: Sizes) -> Floats:
    """Return values at 1, 2, 4 … chunks, interpolated to a number of chunks or an array of them.

    Args:
        octaves: shape (…, octaves); the last one holds for more chunks.
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
"""Predictions that are taken as they are."""
