"""Bursts: by how much the first collectives after a pause are ahead of a link's rate.

A token bucket of B bytes lets B pass at once and everything after it at its rate; a pause fills it
again. A stream of n collectives from rest then takes n·t - B/rate, where each takes t further on.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from moetune.domain.cluster import Group
from moetune.domain.costs import NO_BURST, Burst
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
    leads: dict[tuple[CollectiveOp, Group], list[Burst]] = {}
    for point, of_point in visits.items():
        series = collective.get((point.op, *point.group, point.in_flight))
        if series is not None:
            steady = curve_through(sizes=series.sizes, seconds=series.medians)
            lead = _lead(of_point, steady.predict(point.num_bytes).seconds)
            leads.setdefault((point.op, point.group), []).append(lead)
    middles = {
        place: Burst(
            seconds=statistics.median(one.seconds for one in found),
            share=statistics.median(one.share for one in found),
        )
        for place, found in sorted(leads.items())
    }
    return tuple(
        LinkBurst(
            op=op, group_size=size, num_nodes=nodes, seconds=middle.seconds, share=middle.share
        )
        for (op, (size, nodes)), middle in middles.items()
        if middle.seconds > 0
    )


def _lead(visits: Sequence[Sample], steady_seconds: float) -> Burst:
    """Return by how much the streams were ahead; nothing where that may be noise."""
    kept = undisturbed(visits)
    share = statistics.median(
        1 - seconds / steady_seconds for visit in kept for seconds in visit.seconds
    )
    if share <= _LEAST_SHARE:
        return NO_BURST
    leads = [
        visit.num_iterations * (steady_seconds - seconds)
        for visit in kept
        for seconds in visit.seconds
    ]
    return Burst(seconds=statistics.median(leads), share=min(share, NO_BURST.share))
