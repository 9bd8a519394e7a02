"""Sizes that an online search has settled: which decision holds for a number of tokens.

Algorithm 1 of MPipeMoE keeps one range for each degree and merges every new size into it. Where
the best degree does not only grow with the batch, such a range swallows those of others. Here only
settled sizes are stored, and the ranges follow from them: neighbours with equal decisions are one
range, and a size that contradicts a range splits it.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from moetune.domain.plan import Decision

REACH = 1 / 16
"""A decision holds for sizes that are larger or smaller by up to this share.

Without it a job whose batches all differ would search for each of them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The settled decisions below and above an unsettled size; None beyond the outermost ones."""

    below: Decision | None = None
    above: Decision | None = None

    def degrees(self, largest: int) -> tuple[int, int]:
        """Return the smallest and the largest degree to try.

        Between two settled sizes only the degrees between theirs; beyond the outermost one
        any, since the best degree need not grow.

        Args:
            largest: the largest degree allowed at all.
        """
        if self.below is None or self.above is None:
            return 1, largest
        ends = self.below.degree, self.above.degree
        return min(*ends, largest), min(max(ends), largest)


class AdaptiveRanges:
    """Settled decisions by tokens. Never changed in place.

    A size between two settled ones with equal decisions takes theirs; another one takes that of the
    nearer settled size, where that is within reach.

    Args:
        settled: decisions by the number of tokens that they were found for.
        reach: see `REACH`; 0 for the paper's own ranges.

    Attributes:
        violations: number of neighbours whose degree falls as the tokens grow.
    """

    def __init__(
        self,
        settled: Mapping[int, Decision] = MappingProxyType({}),
        *,
        reach: float = REACH,
    ) -> None:
        self._settled = dict(sorted(settled.items()))
        self._sizes = list(self._settled)
        self._reach = reach
        self.violations = sum(
            below.degree > above.degree for below, above in pairwise(self._settled.values())
        )

    def decide(self, tokens: int) -> Decision | None:
        """Return the decision settled for so many tokens; None in a gap."""
        found = self._settled.get(tokens)
        if found is not None or not self._sizes:
            return found
        at = bisect_left(self._sizes, tokens)
        near = self._sizes[max(at - 1, 0) : at + 1]  # the settled sizes around it
        below, above = near[0], near[-1]
        if below < tokens < above and self._settled[below] == self._settled[above]:
            return self._settled[below]
        nearer = below if tokens <= (below + above) // 2 else above
        return self._settled[nearer] if self.is_near(tokens, nearer) else None

    def gap(self, tokens: int) -> Gap | None:
        """Return the gap that so many tokens lie in; None where a decision holds."""
        if self.decide(tokens) is not None:
            return None
        at = bisect_left(self._sizes, tokens)
        return Gap(
            below=self._settled[self._sizes[at - 1]] if at else None,
            above=self._settled[self._sizes[at]] if at < len(self._sizes) else None,
        )

    def settle(self, tokens: int, decision: Decision) -> "AdaptiveRanges":
        """Return the ranges with one size more; the newest decision for a size holds."""
        return AdaptiveRanges({**self._settled, tokens: decision}, reach=self._reach)

    def is_near(self, tokens: int, size: int) -> bool:
        """Return whether `tokens` are within reach of `size`."""
        return math.ceil(size / (1 + self._reach)) <= tokens <= size * (1 + self._reach)
