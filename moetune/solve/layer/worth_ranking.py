"""Degrees that a plan tells of: the nearest rivals of the chosen ones.

The seconds of all degrees are worked out at once; these are timed with the operations behind them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from moetune.solve.layer.budget import Degrees
from moetune.solve.layer.uncertainty import HOPELESS, NUM_CONTENDERS

NUM_ALTERNATIVES = 5
_NEAREST = 1 + max(NUM_ALTERNATIVES, NUM_CONTENDERS)
"""The chosen degree may be one of them."""

_Seconds = Mapping[int, float]
_Fits = Callable[[int], bool]


def worth_ranking(
    seconds: Sequence[_Seconds], fits: Sequence[_Fits], *, chosen: Degrees, ties: bool
) -> tuple[set[int], set[int]]:
    """Return those of each phase's degrees that a ranking of the phase alone may be asked for.

    The fastest, powers of two that are not hopeless, and one chunk.

    Args:
        seconds: of each phase in every number of chunks.
        fits: tells of a phase's degree whether it fits beside the other phase's choice.
        chosen: of both phases, the best ones.
        ties: whether `rounded` times that are equal tie, so that fewer chunks are ranked first.
    """
    forward, backward = (
        {*_nearest(each, fit, ties=ties), *_powers(each, fit, own)}
        for each, fit, own in zip(seconds, fits, chosen, strict=True)
    )
    return forward, backward


def worth_ranking_together(
    seconds: Sequence[_Seconds], fits: _Fits, *, chosen: Degrees, around_seconds: float, ties: bool
) -> set[int]:
    """Return the same where both phases have as many chunks, for one phase and for the step.

    Args:
        around_seconds: of a step, around both phases.
    """
    forward, backward = seconds
    steps = {one: each + backward[one] + around_seconds for one, each in forward.items()}
    found = worth_ranking(seconds, (fits, fits), chosen=chosen, ties=ties)
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
