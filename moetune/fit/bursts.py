"""Bursts: by how much the first collectives after a pause are ahead of a link's rate.

A token bucket of B bytes lets B pass at once and everything after it at its rate; a pause fills it
again. A stream of n collectives from rest then takes n·t - B/rate, where each takes t further on.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from moetune.domain.cluster import Group
from moetune.domain.profile import LinkBurst
from moetune.domain.samples import BurstPoint, CollectiveOp, Sample, undisturbed
from moetune.fit.curve import curve_through
from moetune.fit.pool import CollectiveKey, Series

_LEAST_SHARE = 0.03
"""Of a stream's time: what a smaller lead says is noise."""


def bursts_of(
    samples: Iterable[Sample], collective: Mapping[CollectiveKey, Series]
) -> tuple[LinkBurst, ...]:
    """Return the burst of each collective and group with streams from rest and further on.

    Args:
        collective: the times further on.
    """
    visits: dict[BurstPoint, list[Sample]] = {}
    for sample in samples:
        if isinstance(sample.point, BurstPoint) and sample.seconds:
            visits.setdefault(sample.point, []).append(sample)
    leads: dict[tuple[CollectiveOp, Group], list[float]] = {}
    for point, of_point in visits.items():
        series = collective.get((point.op, *point.group, point.in_flight))
        if series is not None:
            steady = curve_through(sizes=series.sizes, seconds=series.medians)
            lead = _lead_seconds(of_point, steady.predict(point.num_bytes).seconds)
            leads.setdefault((point.op, point.group), []).append(lead)
    return tuple(
        LinkBurst(op=op, group_size=size, num_nodes=nodes, seconds=statistics.median(found))
        for (op, (size, nodes)), found in sorted(leads.items())
        if statistics.median(found) > 0
    )


def _lead_seconds(visits: Sequence[Sample], steady_seconds: float) -> float:
    """Return the time by which the streams were ahead; 0 where that may be noise."""
    kept = undisturbed(visits)
    ahead = [1 - seconds / steady_seconds for visit in kept for seconds in visit.seconds]
    if statistics.median(ahead) <= _LEAST_SHARE:
        return 0.0
    leads = [
        visit.num_iterations * (steady_seconds - seconds)
        for visit in kept
        for seconds in visit.seconds
    ]
    return statistics.median(leads)
