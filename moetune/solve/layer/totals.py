"""Sums of estimates: their seconds, the least of their trusts, and all of their doubts."""

from collections.abc import Iterable

import numpy as np

from moetune.domain.arrays import is_many, longer
from moetune.domain.costs import Doubt, Estimate, least_trust


def total(*parts: Estimate | None) -> Estimate:
    """Return the sum.

    Args:
        parts: None for what was not measured, which counts as 0 s.
    """
    known = [part for part in parts if part is not None]
    trusts = {part.trust for part in known}
    return Estimate(
        seconds=sum([part.seconds for part in known], 0.0),
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
    doubted = [part for part in parts if part.doubts]
    if not doubted:
        return ()
    if len(doubted) > 1:
        doubted.sort(key=_longest, reverse=True)
    return tuple(dict.fromkeys(doubt for part in doubted for doubt in part.doubts))


def _longest(part: Estimate) -> float:
    """Return the seconds, of many sizes the longest."""
    return float(np.max(part.seconds)) if is_many(part.seconds) else part.seconds
