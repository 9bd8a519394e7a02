"""One visit of a point on this rank: prepare it with the other ranks, time it, mark what disturbed.

`session` says which point is next; all ranks visit it together.
"""

from collections.abc import Sequence

from moetune.comm.agree import first_text, largest
from moetune.domain.errors import InputError
from moetune.domain.samples import UNSTABLE, Point, Sample
from moetune.measure.device import Device
from moetune.measure.estimate import Rates, probe
from moetune.measure.noise import BUSY, THROTTLED, Load
from moetune.measure.operations import Makers, Representatives, prepare_experiment
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.stopwatch import FailedPointError, explain
from moetune.measure.timing import Effort, Timing, measure

_PROBE = Effort(min_blocks=3, max_blocks=3, max_seconds=0.1, warmup_seconds=0.05)


class PointRunner:
    """Measures one point after another on this rank."""

    def __init__(
        self,
        device: Device,
        ranks: MeasuringRanks,
        representatives: Representatives,
        sharers: int,
        makers: Makers,
    ) -> None:
        self._device, self._ranks, self._representatives = device, ranks, representatives
        self._makers = makers
        self._load = Load(device, sharers=sharers)

    def probe(self, points: Sequence[Point]) -> Rates:
        """Return rough speeds."""
        return probe(
            points, self._representatives, lambda point: self._timed(point, _PROBE),
            self._device.kind,
        )  # fmt: skip

    def sample(self, point: Point, effort: Effort) -> Sample:
        """Return the point's times, or its error."""
        try:
            timing = self._timed(point, effort)
        except FailedPointError as error:
            return Sample(point=point, seconds=(), error=error.what)
        mine = [float(sign) for sign in self._load.signs()]
        signs = largest(self._ranks.control, mine, "signs of other load")
        seen = {UNSTABLE: timing.is_unstable, BUSY: signs[0] > 0, THROTTLED: signs[1] > 0}
        return Sample(
            point=point,
            seconds=timing.seconds,
            num_iterations=timing.num_iterations,
            marks=tuple(mark for mark, is_seen in seen.items() if is_seen),
        )

    def _timed(self, point: Point, effort: Effort) -> Timing:
        """Prepare the point on every rank and, if all of them could, measure it."""
        experiment, text = None, ""
        try:
            experiment = prepare_experiment(
                point,
                device=self._device,
                ranks=self._ranks,
                representatives=self._representatives,
                makers=self._makers,
            )
        except (RuntimeError, MemoryError, InputError) as error:
            text = explain(error)
        reason = first_text(self._ranks.control, text, "the preparation of a point")
        if experiment is None or reason:
            raise FailedPointError(reason)
        return measure(experiment, device=self._device, ranks=self._ranks, effort=effort)
