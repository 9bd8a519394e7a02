"""Worth of measuring: how much surer a plan would be if some of its operations were known.

An operation that is known is as it was measured in every refit, as if nothing were left to learn
about it. What its uncertainty costs is the difference that this makes to the plan's confidence.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moetune.domain.model_plan import Confidence

Judge = Callable[[frozenset[str]], Confidence]
"""Confidence in a plan's choice while these families of operations are known."""
LEAST_REGRET = 1e-3
"""Expected loss below which saving it is not worth measuring."""
LEAST_SHARE = 0.1
"""Share of the expected loss, or of the range, below which saving it is not."""
SLIGHT = 0.05
"""Share of what all operations together would save, below which one is left as it is."""
ENOUGH = 0.8
"""Share of what all operations together would save, at which no more are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """Value of measuring one family of operations for a plan.

    Errors add up and hide each other, so that a family saves another part when it is the first
    one to be known than when it is the last: each number is the mean of the two.

    Args:
        regret_saved: of the expected relative loss; negative where its errors hid others'.
        range_saved: of the width of the step's 90 % range, relative to that width.
    """

    family: str
    regret_saved: float
    range_saved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The families worth measuring, and what that is expected to change.

    Args:
        worths: the most valuable first; empty where none are worth it.
        before, after: confidence as it is, and with all of them known.
    """

    worths: tuple[Worth, ...]
    before: Confidence
    after: Confidence


def expected_gain(judge: Judge, families: Iterable[str], *, rough: Judge) -> Gain:
    """Return the families whose uncertainty moves the choice most, then those of its range.

    One after the other they become known, until that saves `ENOUGH` of what knowing all of them
    would save. What then remains is the error of the model, and noise.

    Args:
        rough: with fewer refits, to rank the families by.
    """
    everything = frozenset(families)
    before, best = judge(frozenset()), judge(everything)
    most = _saved(before, best)
    wants_regret = most[0] >= max(LEAST_REGRET, LEAST_SHARE * before.expected_regret)
    wants_range = most[1] >= LEAST_SHARE
    left = []
    if wants_regret or wants_range:
        left = [
            one
            for one in _worths(rough, everything)
            if (wants_regret and one.regret_saved >= SLIGHT * most[0])
            or (wants_range and one.range_saved >= SLIGHT * most[1])
        ]
    after, worths = before, []
    while left and (wants_regret or wants_range):
        worth = max(left, key=_by_regret if wants_regret else _by_range)
        left.remove(worth)
        worths.append(worth)
        after = judge(frozenset(one.family for one in worths))
        saved = _saved(before, after)
        wants_regret &= saved[0] < ENOUGH * most[0]
        wants_range &= saved[1] < ENOUGH * most[1]
    return Gain(worths=tuple(worths), before=before, after=after)


_Saved = tuple[float, float]
"""Of the expected loss, and the share of the range."""


def _worths(judge: Judge, everything: frozenset[str]) -> list[Worth]:
    """Return the families' worths, without those that alone make next to nothing unsure."""
    before = judge(frozenset())
    together = _saved(before, judge(everything))
    found = []
    for family in sorted(everything):
        others = _saved(before, judge(everything - {family}))
        last = [most - rest for most, rest in zip(together, others, strict=True)]
        if all(one < SLIGHT * most for one, most in zip(last, together, strict=True)):
            continue
        first = _saved(before, judge(frozenset({family})))
        regret_saved, range_saved = (
            (one + other) / 2 for one, other in zip(first, last, strict=True)
        )
        found.append(Worth(family=family, regret_saved=regret_saved, range_saved=range_saved))
    return found


def _saved(before: Confidence, after: Confidence) -> _Saved:
    width = _width(before)
    range_saved = 1 - _width(after) / width if width else 0.0
    return before.expected_regret - after.expected_regret, range_saved


def _by_regret(worth: Worth) -> tuple[float, float]:
    return worth.regret_saved, worth.range_saved


def _by_range(worth: Worth) -> tuple[float, float]:
    return worth.range_saved, worth.regret_saved


def _width(confidence: Confidence) -> float:
    return confidence.p95_step_seconds - confidence.p05_step_seconds
