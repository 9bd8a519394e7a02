"""Sums of estimates: their seconds, the least of their trusts, and all of their doubts."""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

import numpy as np

from moetune.domain.arrays import is_many, longer
from moetune.domain.costs import Doubt, Estimate, least_trust

_SECONDS, _TRUST, _DOUBTS = map(attrgetter, Estimate._fields)  # a plan sums thousands


def total(*parts: Estimate | None) -> Estimate:
    """Return the sum.

    Args:
        parts: None for what was not measured, which counts as 0 s.
    """
    known = [part for part in parts if part is not None]
    trusts = set(map(_TRUST, known))
    return Estimate(
        seconds=sum(map(_SECONDS, known), 0.0),
        trust=least_trust(trusts) if len(trusts) != 1 else trusts.pop(),
        doubts=doubts_of(known),
    )


def at_least(estimate: Estimate, least: Estimate | None) -> Estimate:
    """Return the estimate, or what it cannot be shorter than; None for nothing."""
    if least is None:
        return estimate
    return estimate._replace(seconds=longer(estimate.seconds, least.seconds))


def doubts_of(parts: Iterable[Estimate]) -> tuple[Doubt, ...]:
    """Return the doubts in any of the estimates, each once, those about the longest first."""
    doubted = list(filter(_DOUBTS, parts))
    if len(doubted) < 2:  # noqa: PLR2004 - nothing to merge
        return doubted[0].doubts if doubted else ()
    doubted.sort(key=_longest, reverse=True)
    return tuple(dict.fromkeys(chain.from_iterable(map(_DOUBTS, doubted))))


def _longest(part: Estimate) -> float:
    """Return the seconds, of many sizes the longest."""
    return float(np.max(part.seconds)) if is_many(part.seconds) else part.seconds
