"""Equal groups of experts whose fullest group has the least load: balanced k-way partitioning.

Longest-processing-time-first with equal numbers a group, improved by swaps, gives groups; branch
and bound improves them, or proves that there are none better. It is exact where it ends within
`MOST_TRIALS`, as with 16 experts it does; otherwise the lower bound says how far from the least
the result is at most.

Source: Graham (1969) for the first, Babel, Kellerer and Kotov (1998) for equal numbers.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from moetune.domain.arrays import Floats

MOST_TRIALS = 50_000
"""Experts that branch and bound puts into a group: some hundredths of a second.

The swaps before it take as long for 256 experts, and half a second for 1,024 in 8 groups.
"""
_MOST_SEARCHED = 256
"""Experts beyond which swaps have the last word: the search goes one call deeper for each."""
_SAME = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """Groups of experts, each ascending, in the order of their first experts.

    Args:
        fullest: load of the fullest group.
        least: no partition's fullest group has less.
    """

    groups: tuple[tuple[int, ...], ...]
    fullest: float
    least: float


def group_experts(
    loads: Sequence[float],
    num_groups: int,
    *,
    tolerance: float = 0.0,
    most_trials: int | None = None,
) -> ExpertGroups:
    """Return equal groups whose fullest one has as little load as was found; deterministic.

    Args:
        loads: of each expert; their number divides by that of the groups.
        tolerance: share by which the fullest group may be above `least_fullest`; closer ones are
            not looked for.
        most_trials: of branch and bound; `MOST_TRIALS` by default.
    """
    order = sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert))
    sorted_loads = [loads[expert] for expert in order]
    bound = _lower_bound(sorted_loads, num_groups)
    first = _longest_first(sorted_loads, num_groups)
    enough = bound * (1 + tolerance)
    search = _Search(sorted_loads, num_groups, enough)
    search.most_trials = MOST_TRIALS if most_trials is None else most_trials
    search.improve(_swapped(sorted_loads, first, enough if tolerance else 0.0))
    is_exact = search.run() and not (tolerance and search.fullest <= enough)
    groups = (tuple(sorted(order[at] for at in group)) for group in search.best)
    return ExpertGroups(
        groups=tuple(sorted(groups)), fullest=search.fullest,
        least=search.fullest if is_exact else bound,
    )  # fmt: skip


def least_fullest(loads: Sequence[float], num_groups: int) -> float:
    """Return what the fullest of equal groups has at least, without looking for any."""
    return _lower_bound(sorted(loads, reverse=True), num_groups)


def _lower_bound(loads: Sequence[float], num_groups: int) -> float:
    """Return the most of three bounds: the mean, the largest's group, and two of the next ones.

    The largest expert has the smallest ones beside it at best. Of the first P + 1 experts two
    share a group, and they do with the smallest ones beside them.

    Args:
        loads: descending.
    """
    each = len(loads) // num_groups
    mean = sum(loads) / num_groups
    beside = loads[0] + sum(loads[len(loads) - each + 1 :])
    if each == 1:
        return max(mean, beside)
    two = loads[num_groups - 1] + loads[num_groups]
    return max(mean, beside, two + sum(loads[len(loads) - each + 2 :]))


def _longest_first(loads: Sequence[float], num_groups: int) -> list[list[int]]:
    """Return groups filled from the largest load on, each into the emptiest that has room."""
    each = len(loads) // num_groups
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    open_groups = [(0.0, group) for group in range(num_groups)]
    for at, load in enumerate(loads):
        before, emptiest = heapq.heappop(open_groups)
        groups[emptiest].append(at)
        if len(groups[emptiest]) < each:
            heapq.heappush(open_groups, (before + load, emptiest))
    return groups


def _swapped(loads: Sequence[float], groups: list[list[int]], enough: float) -> list[list[int]]:
    """Return the groups after swaps with the fullest one, each the best there is, until none helps.

    Every swap lowers the fullest group and leaves the other one below what that had.

    Args:
        enough: load of the fullest group that need not be lowered.
    """
    all_loads = np.array(loads, float)
    sums = [sum(loads[at] for at in group) for group in groups]
    while True:
        fullest = max(range(len(groups)), key=lambda group: (sums[group], -group))
        if sums[fullest] <= enough:
            return groups
        after = _after_swaps(all_loads[np.array(groups)], np.array(sums), fullest)
        best = after.argmin()
        if not after.flat[best] < sums[fullest] * (1 - _SAME):
            return groups
        other, mine, theirs = (int(at) for at in np.unravel_index(best, after.shape))
        pair = groups[fullest][mine], groups[other][theirs]
        groups[other][theirs], groups[fullest][mine] = pair
        for group in (fullest, other):
            sums[group] = sum(loads[at] for at in groups[group])


def _after_swaps(loads: Floats, sums: Floats, fullest: int) -> Floats:
    """Return the fuller of two groups after each swap, [other, mine, theirs]; infinite if it rises.

    Args:
        loads: of the groups' experts, [group, place].
        sums: of the groups.
    """
    moved = loads[fullest][:, None] - loads[:, None, :]
    after: Floats = np.maximum(sums[fullest] - moved, sums[:, None, None] + moved)
    after[moved <= 0] = np.inf
    return after


class _Search:
    """Branch and bound over descending loads, each into one of the groups that has room.

    Attributes:
        best: groups with the least fullest one so far, `fullest`.
        most_trials: experts that are put into a group.
    """

    most_trials = MOST_TRIALS

    def __init__(self, loads: Sequence[float], num_groups: int, bound: float) -> None:
        self._loads, self._bound = loads, bound
        self._each = len(loads) // num_groups
        self._groups: list[list[int]] = [[] for _ in range(num_groups)]
        self._sums = [0.0] * num_groups
        self._trials = 0
        # Of the smallest 0, 1, 2 and more experts together.
        self._smallest = list(accumulate(reversed(loads[-self._each :]), initial=0.0))
        self.best: tuple[tuple[int, ...], ...] = ()
        self.fullest = float("inf")

    def improve(self, groups: Sequence[Sequence[int]]) -> None:
        """Keep the groups where their fullest one has less than the best so far."""
        fullest = max(sum(self._loads[at] for at in group) for group in groups)
        if fullest < self.fullest:
            self.fullest, self.best = fullest, tuple(tuple(group) for group in groups)

    def run(self) -> bool:
        """Search until no groups are better, and return whether that was within the limit."""
        if len(self._loads) <= _MOST_SEARCHED:
            self._place(0)
            return self._trials < self.most_trials
        return self._is_least()

    def _place(self, at: int) -> None:
        """Try one expert, and all after it, in every group that can still be better."""
        if self._is_least():
            return
        if at == len(self._loads):
            self.improve(self._groups)
            return
        seen = set[tuple[float, int]]()
        by_load = sorted(range(len(self._groups)), key=lambda group: (self._sums[group], group))
        for group in by_load:
            self._trials += 1
            if self._trials >= self.most_trials:
                return
            members, before = self._groups[group], self._sums[group]
            like = before, len(members)
            if len(members) == self._each or like in seen or not self._can_win(group, at):
                continue
            seen.add(like)
            members.append(at)
            self._sums[group] = before + self._loads[at]
            self._place(at + 1)
            members.pop()
            self._sums[group] = before

    def _is_least(self) -> bool:
        return self.fullest <= self._bound * (1 + _SAME)

    def _can_win(self, group: int, at: int) -> bool:
        """Return whether the group with this expert, and the smallest ones beside, is better."""
        beside = self._each - len(self._groups[group]) - 1
        whole = self._sums[group] + self._loads[at] + self._smallest[beside]
        return whole < self.fullest * (1 - _SAME)
