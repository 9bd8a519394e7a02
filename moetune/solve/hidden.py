"""Gradients and parameters of replicas beside a pass, as `runtime.parallel.buckets` runs them."""

from moetune.domain.interference import OverlapSpeeds


def exposed_beside(seconds: float, *, last: float, computed: float, speeds: OverlapSpeeds) -> float:
    """Return what a row of collectives adds to the pass that it runs beside.

        h = min(T - T_last, C·v_comm / v_comp),   T - h·(v_comm + v_comp - 1) / v_comm

    h is what computation hides, v are the speeds of both beside each other: h takes h / v_comm,
    in which computation loses the share 1 - v_comp. The pass's own exchanges hide nothing: they
    have the same link.

    Args:
        seconds: T, of all by themselves.
        last: T_last, of the bucket that no computation is left for: in a backward pass that of the
            first blocks, whose gradients are made last, in a forward one the same, whose
            parameters are wanted first.
        computed: C, of the pass while the link is idle, but for the block whose bucket is not made
            or wanted yet.
    """
    gained = (speeds.comm + speeds.comp - 1) / speeds.comm
    hidden = min(max(0.0, seconds - last), computed * speeds.comm / speeds.comp)
    return seconds - gained * hidden
