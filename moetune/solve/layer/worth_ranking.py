"""Degrees that a plan tells of: the nearest rivals of the chosen ones.

The seconds of all degrees are worked out at once; these are timed with the operations behind them.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from moetune.solve.layer.uncertainty import HOPELESS, NUM_CONTENDERS

NUM_ALTERNATIVES = 5
_NEAREST = 1 + max(NUM_ALTERNATIVES, NUM_CONTENDERS)
"""The chosen degree may be one of them."""

_Seconds = Mapping[int, float]
_Fits = Callable[[int], bool]


def worth_ranking(seconds: _Seconds, fits: _Fits, *, chosen: int, ties: bool) -> set[int]:
    """Return those of a phase's degrees that a ranking of the phase alone may be asked for.

    The fastest, powers of two that are not hopeless, and one chunk.

    Args:
        seconds: of the phase in every number of chunks.
        fits: tells of a degree whether it fits beside the other phase's choice.
        chosen: the best one.
        ties: whether `rounded` times that are equal tie, so that fewer chunks are ranked first.
    """
    return {*_nearest(seconds, fits, ties=ties), *_powers(seconds, fits, chosen)}


def worth_ranking_together(
    phases: tuple[_Seconds, _Seconds],
    fits: _Fits,
    *,
    chosen: int,
    around_seconds: float,
    ties: bool,
) -> set[int]:
    """Return the same where both phases have as many chunks, for one phase and for the step.

    Args:
        phases: seconds of each.
        around_seconds: of a step, around both phases.
    """
    forward, backward = phases
    steps = {one: each + backward[one] + around_seconds for one, each in forward.items()}
    found = (worth_ranking(one, fits, chosen=chosen, ties=ties) for one in phases)
    return set().union(*found, _nearest(steps, fits, ties=True))


def rounded(seconds: float) -> float:
    """Return the time without its last digits, which rounding errors of sums may change."""
    return float(f"{seconds:.11e}")


def _nearest(seconds: _Seconds, fits: _Fits, *, ties: bool) -> Iterator[int]:
    """Return the fastest that fit."""
    order = {one: (rounded(each) if ties else each, one) for one, each in seconds.items()}
    return islice(filter(fits, sorted(order, key=order.__getitem__)), _NEAREST)


def _powers(seconds: _Seconds, fits: _Fits, own: int) -> Iterator[int]:
    """Yield one chunk, and the powers of two that are not hopeless."""
    limit = seconds[own] * HOPELESS
    for degree, each in seconds.items():
        if degree.bit_count() == 1 and (degree == 1 or each <= limit) and fits(degree):
            yield degree
