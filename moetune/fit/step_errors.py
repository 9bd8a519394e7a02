"""Error of predicted layer steps, learned from whole steps that the profile measured as well.

The logarithm of measured over predicted time is modelled as a Gaussian process. Its prior is the
record of the network lab (`RECORDED_SPREAD`), wide and without a bias. Steps measured on this
machine shift and narrow it, most for the same layer, tokens and number of chunks.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.layer import LayerKey
from moetune.domain.once import Tables, once
from moetune.domain.samples import GemmPoint, Point, Sample, StepRecord, undisturbed
from moetune.domain.step_errors import GAP_SECONDS, SHARED_OCTAVES, SUSTAINED, StepErrors

RECORDED_SPREAD = 0.068
"""Standard deviation of log(measured / predicted) over the network lab's steps, predicted as sums
of operations. There are 12 cells of five numbers of chunks (`docs/results/netlab-sums.json`) with
independent errors."""
NUM_OCTAVES = 11
"""Powers of two among numbers of chunks, from 1 to 1024; more chunks have the error of 1024."""
TOKEN_OCTAVES = 3.0
"""Octaves of tokens over which the correlation falls to 1/e."""
OTHER_LAYER = 0.5
"""Correlation of the errors of two layers on one machine."""
NOISE = 0.02
"""Standard deviation of the noise in a measured step's logarithm."""

WILD = 0.2
"""Residual above which a measured step counts as disturbed."""
EXACT = 0.002
"""Standard deviation of a residual under a refit of the costs: practically 0. Predictions of a
measured step differ between refits by more than any observed error."""
DRIFT = 0.06
"""Standard deviation of a machine's change of speed in a later job. Unseen cells of the network
lab, measured again minutes later, differed by -8 to +13 % in nine of ten cases."""
PUBLISHED_SPREAD = 0.19
"""Standard deviation of an error that all steps share if the kernels are published. Twelve layer
steps on an H100 and an H200 took 1.01 to 1.44 times their prediction. Their root mean square of
0.21 combines this spread, the drift and the lab's spread (docs/results/gpu.md)."""
LARGEST_SEEN, LARGEST_BUSY = 0.15, 0.5
"""Upper limits of the drift shown by visits of GEMMs: on a quiet machine, and on a machine that was
busy most of the time."""
_FEWEST_ALIKE = 3
"""Number of measured steps from which a common residual counts as the machine's."""
_FEWEST_VISITS = 10
_MOST, _NINE_OF_TEN = 0.9, 1.645

_OCTAVES: Floats = np.arange(NUM_OCTAVES, dtype=float)


@dataclass(frozen=True, kw_only=True, eq=False)
class MachineErrors(Tables):
    """Errors of any layer's steps on one machine.

    Args:
        spread: standard deviation of the error if nothing was measured.
        drift: spread of the machine's speed in a later job, as of `drift_of`.
        has_published_kernels: whether its GEMMs come from tables, each measured alone.
    """

    records: Sequence[StepRecord]
    spread: float
    drift: float = DRIFT
    has_published_kernels: bool = False

    @once(lambda key, tokens: (key, tokens))
    def of(self, key: LayerKey, tokens: int) -> StepErrors:
        """Return the errors by number of chunks for a step with `tokens` on each rank."""
        near = tuple(record for record in self.records if _likeness(record.workload.key, key))
        return self._posterior(key, tokens, near) if near else self._prior_errors

    @cached_property
    def _prior_errors(self) -> StepErrors:
        """Errors of a layer without a similar measured step, for any number of tokens."""
        mean, roots = np.zeros(NUM_OCTAVES), _roots(self._prior + self.drift**2)
        if not self.has_published_kernels:
            return StepErrors(mean=mean, roots=roots)
        return StepErrors(
            mean=mean, roots=roots, gemm_factor=1 / SUSTAINED, gap_seconds=GAP_SECONDS,
            shared=PUBLISHED_SPREAD,
        )  # fmt: skip

    @cached_property
    def _prior(self) -> Floats:
        prior: Floats = self.spread**2 * _degree_kernel(_OCTAVES, _OCTAVES)
        return prior

    def _posterior(self, key: LayerKey, tokens: int, near: tuple[StepRecord, ...]) -> StepErrors:
        sizes = np.log2([record.workload.tokens_per_rank for record in near])
        degrees = np.log2([record.degree for record in near])
        keys = [record.workload.key for record in near]
        among = self.spread**2 * _degree_kernel(degrees, degrees) * _size_kernel(sizes, sizes)
        among *= [[_likeness(row, column) for column in keys] for row in keys]
        across = self.spread**2 * _degree_kernel(_OCTAVES, degrees)
        across *= _size_kernel(np.log2([tokens]), sizes) * [
            _likeness(key, near_key) for near_key in keys
        ]
        residuals = np.array([record.residual for record in near])
        usual = statistics.median(residuals.tolist()) if len(near) >= _FEWEST_ALIKE else 0.0
        measured_noise = _noise(residuals - usual)
        gain, exact = (
            np.linalg.solve(among + np.diag(noise**2), across.T).T
            for noise in (measured_noise, np.full(len(near), EXACT))
        )
        return StepErrors(
            mean=gain @ residuals,
            roots=_roots(self._prior - gain @ across.T + self.drift**2),
            records=near,
            gain=np.asarray(exact, float),
        )


def _noise(residuals: Floats) -> Floats:
    """Return the standard deviations of measured steps; a wild step gets its excess over `WILD`.

    No step in the record is off by more than `WILD`; such a step was most likely disturbed.

    Args:
        residuals: minus the machine's usual residual, which a permanent load may cause.
    """
    deviations: Floats = np.hypot(NOISE, np.maximum(np.abs(residuals) - WILD, 0.0))
    return deviations


def drift_of(samples: Iterable[Sample]) -> float:
    """Return the spread of GEMM visits around the least disturbed visits.

    A profile predicts an undisturbed machine, but jobs run on the machine as it is. GEMMs repeat
    best, so differences between their visits come from the machine. Visits during which other
    programs ran count only if there are no others. The spread covers nine tenths of the time: a
    step consists of long GEMMs, and short GEMMs vary more. Visits are minutes apart at most, so
    half of the variance comes from the record, `DRIFT`.

    A machine that was busy for most of its profile stays busy in later jobs: then all blocks count.
    """
    visits: dict[Point, list[Sample]] = {}
    for sample in samples:
        if isinstance(sample.point, GemmPoint) and sample.seconds:
            visits.setdefault(sample.point, []).append(sample)
    all_visits = [visit for several in visits.values() for visit in several]
    is_busy = 2 * _total_seconds(visit for visit in all_visits if visit.marks) > _total_seconds(
        all_visits
    )
    distances: list[float] = []
    weights: list[float] = []
    for several in visits.values():
        if len(several) > 1 or is_busy:
            calm = statistics.median(visit.median_seconds for visit in undisturbed(several))
            times = _times(several, is_busy=is_busy)
            distances += [abs(math.log(seconds / calm)) for seconds in times]
            weights += [calm] * len(times)
    if len(distances) < _FEWEST_VISITS:
        return DRIFT
    order = np.argsort(distances)
    reached = np.cumsum(np.array(weights)[order]) >= _MOST * math.fsum(weights)
    spread = distances[int(order[np.argmax(reached)])] / _NINE_OF_TEN
    drift = math.sqrt((min(spread, LARGEST_SEEN) ** 2 + DRIFT**2) / 2)
    return max(drift, min(spread, LARGEST_BUSY)) if is_busy else drift


def _total_seconds(visits: Iterable[Sample]) -> float:
    return math.fsum(visit.median_seconds for visit in visits)


def _times(visits: Sequence[Sample], *, is_busy: bool) -> list[float]:
    """Return a point's times: medians of its undisturbed visits; on a busy machine, all blocks."""
    if is_busy:
        return [seconds for visit in visits for seconds in visit.seconds]
    return [visit.median_seconds for visit in visits if not visit.marks] or [
        visit.median_seconds for visit in visits
    ]


def _degree_kernel(degrees: Floats, seen_degrees: Floats) -> Floats:
    """Return the correlation between numbers of chunks, given in octaves."""
    octaves = np.abs(degrees[:, None] - seen_degrees[None, :])
    return np.maximum(1 - octaves / SHARED_OCTAVES, 0.0)


def _size_kernel(sizes: Floats, seen_sizes: Floats) -> Floats:
    octaves = np.abs(sizes[:, None] - seen_sizes[None, :])
    correlation: Floats = np.exp(-octaves / TOKEN_OCTAVES)
    return correlation


def _likeness(key: LayerKey, second: LayerKey) -> float:
    """Return the correlation of two layers' errors; 0 if dtype or expert parallelism differs."""
    if key == second:
        return 1.0
    kinds = [(layer.dtype, layer.expert_parallel) for layer in (key, second)]
    return OTHER_LAYER if kinds[0] == kinds[1] else 0.0


def _roots(covariance: Floats) -> Floats:
    """Return the symmetric square root; eigenvalues that rounding made negative count as 0."""
    values, vectors = np.linalg.eigh(covariance)
    roots: Floats = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    return roots
