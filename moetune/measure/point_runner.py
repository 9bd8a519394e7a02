"""One visit of a point on this rank: prepare it with the other ranks, time it, mark disturbances.

`session` says which point is next; all ranks visit it together.
"""

from collections.abc import Sequence

from moetune.comm.agree import first_text, largest
from moetune.domain.errors import InputError
from moetune.domain.samples import UNSTABLE, Point, Sample
from moetune.measure.estimate import Rates, probe
from moetune.measure.noise import THROTTLED, Clock
from moetune.measure.operations import Bench, prepare_experiment
from moetune.measure.timing import Effort, FailedPointError, Timing, explain, measure

_PROBE = Effort(min_blocks=3, max_blocks=3, max_seconds=0.1, warmup_seconds=0.05)


class PointRunner:
    """Measures one point after another on this rank, together with the other ranks."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._clock = bench, Clock(bench.device)

    def probe(self, points: Sequence[Point]) -> Rates:
        """Return rough speeds."""
        return probe(points, self._bench, lambda point: self._timed(point, _PROBE))

    def sample(self, point: Point, effort: Effort) -> Sample:
        """Return the point's times, or its error."""
        try:
            timing = self._timed(point, effort)
        except FailedPointError as error:
            return Sample(point=point, seconds=(), error=error.what)
        (is_low,) = largest(self._bench.ranks.control, (self._clock.is_low(),), "low clocks")
        seen = {UNSTABLE: timing.is_unstable, THROTTLED: is_low > 0}
        return Sample(
            point=point,
            seconds=timing.seconds,
            num_iterations=timing.num_iterations,
            marks=tuple(mark for mark, is_seen in seen.items() if is_seen),
        )

    def _timed(self, point: Point, effort: Effort) -> Timing:
        """Prepare the point on every rank and, if all of them could, measure it."""
        bench, experiment, text = self._bench, None, ""
        try:
            experiment = prepare_experiment(point, bench)
        except (RuntimeError, MemoryError, InputError) as error:
            text = explain(error)
        reason = first_text(bench.ranks.control, text, "the preparation of a point")
        if experiment is None or reason:
            raise FailedPointError(reason)
        return measure(experiment, device=bench.device, ranks=bench.ranks, effort=effort)
