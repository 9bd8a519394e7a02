"""Gradients and parameters of replicas beside a pass, as `runtime.parallel.buckets` runs them."""

from collections.abc import Iterable
from typing import NamedTuple

from moetune.domain.interference import OverlapSpeeds


class Bucket(NamedTuple):
    """When a bucket can travel beside a backward pass.

    A forward pass is its mirror image: the buckets arrive from the last one of this order on.

    Args:
        made: share of the pass's computation before it.
        seconds_before: of the buckets that travel before it.
    """

    made: float
    seconds_before: float


def exposed_beside(
    seconds: float,
    buckets: Iterable[Bucket],
    *,
    computed: float,
    speeds: OverlapSpeeds,
    exchanged: float = 0.0,
) -> float:
    """Return what a row of buckets adds to the pass that it runs beside.

        T - h·(v_comm + v_comp - 1) / v_comm,   h = min of b·R / (R + E) + (1 - m)·R,
        R = C·v_comm / v_comp

    A bucket is made when the share m of the pass is computed, and travels behind others, which take
    b: it and all behind it begin no earlier than either. That of the first blocks is made last, so
    that no computation is left for it, and forward it is wanted first. h is what computation hides,
    v are the speeds of both beside each other: h takes h / v_comm, in which computation loses the
    share 1 - v_comp. The pass's own exchanges hide nothing: they have the same link. Buckets that
    are sent during exchanges have half of it, and delay these by as much as they get.

    Args:
        seconds: T, of all by themselves.
        computed: C, of the pass while the link is idle.
        exchanged: E, of the pass's own exchanges while buckets are sent, which take turns with
            them on the link; 0 where buckets wait for exchanges.
    """
    room = computed * speeds.comm / speeds.comp
    beside = room / (room + exchanged) if exchanged else 1.0
    hidden = min(
        (
            beside * one.seconds_before + ((1 - one.made) * room if one.made < 1 else 0.0)
            for one in buckets
        ),
        default=0.0,
    )
    return seconds - hidden * (speeds.comm + speeds.comp - 1) / speeds.comm
