"""Sizes that an online search has settled: which decision holds for a number of tokens.

Algorithm 1 of MPipeMoE keeps one range for each degree and merges every new size into it. Where
the best degree does not only grow with the batch, such a range swallows those of others. Here only
settled sizes are stored, and the ranges follow from them: neighbours with equal decisions are one
range, and a size that contradicts a range splits it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from moetune.domain.layer import Phase
from moetune.domain.plan import Decision

REACH = 1 / 16
"""A decision holds for sizes that are larger or smaller by up to this share.

Without it a job whose batches all differ would search for each of them.
"""

Span = tuple[int, int, Decision]
"""(low_tokens, high_tokens, decision), both ends included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The settled decisions below and above an unsettled size; None beyond the outermost ones."""

    below: Decision | None = None
    above: Decision | None = None

    def degrees(self, phase: Phase, largest: int) -> tuple[int, int]:
        """Return the smallest and the largest degree to try.

        Between two settled sizes only the degrees between theirs; beyond the outermost one
        any, since the best degree need not grow.

        Args:
            largest: the largest degree allowed at all.
        """
        if self.below is None or self.above is None:
            return 1, largest
        ends = [
            one.forward_degree if phase == "forward" else one.backward_degree
            for one in (self.below, self.above)
        ]
        return min(*ends, largest), min(max(ends), largest)


class AdaptiveRanges:
    """Settled decisions by tokens, and the disjoint ranges that follow. Never changed in place.

    Args:
        settled: decisions by the number of tokens that they were found for.
        reach: see `REACH`; 0 for the paper's own ranges.

    Attributes:
        spans: the ranges, ascending; sizes between two of them are not settled.
        violations: number of neighbours whose degrees fall as the tokens grow.
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
        self.spans = self._spans()
        self._lows = [low for low, _, _ in self.spans]
        self.violations = sum(
            below.forward_degree > above.forward_degree
            or below.backward_degree > above.backward_degree
            for below, above in pairwise(self._settled.values())
        )

    def decide(self, tokens: int) -> Decision | None:
        """Return the decision settled for so many tokens; None in a gap.

        A dictionary in front, a bisection behind: O(log n) for n ranges.
        """
        if tokens in self._settled:
            return self._settled[tokens]
        index = bisect_right(self._lows, tokens) - 1
        if index < 0 or tokens > self.spans[index][1]:
            return None
        return self.spans[index][2]

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
        return is_near(tokens, size, reach=self._reach)

    def _spans(self) -> tuple[Span, ...]:
        spans: list[Span] = []
        previous = 0
        for size, decision in self._settled.items():
            low, high = _low(size, self._reach), _high(size, self._reach)
            if spans and spans[-1][2] == decision:
                spans[-1] = spans[-1][0], high, decision
            else:
                if spans:
                    middle = (previous + size) // 2
                    before = spans[-1]
                    spans[-1] = before[0], min(before[1], middle), before[2]
                    low = max(low, middle + 1)
                spans.append((low, high, decision))
            previous = size
        return tuple(spans)


def is_near(tokens: int, size: int, *, reach: float = REACH) -> bool:
    """Return whether a number of tokens takes the decision of a settled size."""
    return _low(size, reach) <= tokens <= _high(size, reach)


def _low(size: int, reach: float) -> int:
    return math.ceil(size / (1 + reach))


def _high(size: int, reach: float) -> int:
    return math.floor(size * (1 + reach))
