"""One visit of a point on this rank: prepare it with the other ranks, time it, mark what disturbed.

`session` says which point is next; all ranks visit it together.
"""

from collections.abc import Sequence

from moetune.comm.agree import first_text, largest
from moetune.domain.errors import InputError
from moetune.domain.samples import UNSTABLE, Point, Sample
from moetune.measure.estimate import Rates, probe
from moetune.measure.noise import BUSY, THROTTLED, Load
from moetune.measure.operations import Bench, prepare_experiment
from moetune.measure.stopwatch import FailedPointError, explain
from moetune.measure.timing import Effort, Timing, measure

_PROBE = Effort(min_blocks=3, max_blocks=3, max_seconds=0.1, warmup_seconds=0.05)


class PointRunner:
    """Measures one point after another on this rank, together with the other ranks.

    Args:
        sharers: ranks on this rank's cores.
    """

    def __init__(self, bench: Bench, sharers: int) -> None:
        self._bench = bench
        self._load = Load(bench.device, sharers=sharers)

    def probe(self, points: Sequence[Point]) -> Rates:
        """Return rough speeds."""
        return probe(points, self._bench, lambda point: self._timed(point, _PROBE))

    def sample(self, point: Point, effort: Effort) -> Sample:
        """Return the point's times, or its error."""
        try:
            timing = self._timed(point, effort)
        except FailedPointError as error:
            return Sample(point=point, seconds=(), error=error.what)
        mine = [float(sign) for sign in self._load.signs()]
        signs = largest(self._bench.ranks.control, mine, "signs of other load")
        seen = {UNSTABLE: timing.is_unstable, BUSY: signs[0] > 0, THROTTLED: signs[1] > 0}
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
