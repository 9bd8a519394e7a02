"""Gradients and parameters of replicas beside a pass, as `runtime.parallel.buckets` runs them."""

from moetune.domain.gradients import LEAST_BUCKET_BYTES
from moetune.domain.interference import OverlapSpeeds


def num_buckets(num_blocks: int, num_bytes: float) -> int:
    """Return the buckets of a rank's blocks, at least one.

    Args:
        num_bytes: of its parameters.
    """
    return max(1, min(num_blocks, int(num_bytes // LEAST_BUCKET_BYTES)))


def exposed_beside(
    seconds: float, *, first: float, computed: float, num_buckets: int, speeds: OverlapSpeeds
) -> float:
    """Return what a row of n buckets adds to the pass that it runs beside.

        h = min(T - T_1, (1 - 1/n)·C·v_comm / v_comp),   T - h·(v_comm + v_comp - 1) / v_comm

    T_1 is the bucket that no computation is left for, of the first blocks: backward it is made
    last, and forward it is wanted first; it has 1/n of all at least. Beside as many blocks at the
    other end of the pass nothing travels: no bucket is made yet, or all are there. h is what
    computation hides, v are the speeds of both beside each other: h takes h / v_comm, in which
    computation loses the share 1 - v_comp. The pass's own exchanges hide nothing: they have the
    same link.

    Args:
        seconds: T, of all by themselves.
        first: of the first block's parameters, and of those before it.
        computed: C, of the pass while the link is idle.
    """
    hidden = 0.0
    if num_buckets > 1:
        room = (1 - 1 / num_buckets) * computed * speeds.comm / speeds.comp
        hidden = min(max(0.0, seconds - max(first, seconds / num_buckets)), room)
    return seconds - hidden * (speeds.comm + speeds.comp - 1) / speeds.comm
