"""The sizes at which the degrees of one range of tokens give way to the next range's."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moetune.domain.arrays import FEW
from moetune.domain.layer import PHASES
from moetune.solve.layer.budget import Degrees
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.closed import closed_times
from moetune.solve.layer.phase_arrays import Ints
from moetune.solve.layer.simulated import exact_seconds

RESOLUTION = 256
"""A change is found to 1/256 of T: on both sides of it the times are equal."""
_MANY = 3
"""Changes from which on it pays to answer the questions of several halvings at once."""
_HALVINGS = 4
"""So many at once: the seven of half a factor of two then take two rounds."""


class Change(NamedTuple):
    """Degrees that hold up to a size `low`, and others that hold from a size `high` on."""

    low: int
    high: int
    before: Degrees
    after: Degrees


def places_of(chooser: DegreeChooser, changes: Sequence[Change]) -> list[int]:
    """Return for each change the size up to `high` from which the degrees `after` are faster."""
    halvings = _HALVINGS if len(changes) >= _MANY else 1
    spans = [(one.low, one.high) for one in changes]
    while asked := [
        (at, middle) for at, span in enumerate(spans) for middle in _middles(*span, halvings)
    ]:
        questions = [(middle, changes[at]) for at, middle in asked]
        found = _are_faster(chooser, questions, at_once=halvings > 1)
        answers = dict(zip(asked, found, strict=True))
        spans = [
            _halved(*span, {middle: answers[one, middle] for one, middle in asked if one == at})
            for at, span in enumerate(spans)
        ]
    return [high for _, high in spans]


def _is_open(low: int, high: int) -> bool:
    return high - low > max(1, low // RESOLUTION)


def _middles(low: int, high: int, halvings: int) -> Iterator[int]:
    """Yield the middles of an interval, and of what so many halvings may leave of it."""
    if halvings and _is_open(low, high):
        middle = (low + high) // 2
        yield middle
        yield from _middles(low, middle, halvings - 1)
        yield from _middles(middle, high, halvings - 1)


def _halved(low: int, high: int, is_faster: dict[int, bool]) -> tuple[int, int]:
    """Return what is left of an interval, halved as often as there are answers for."""
    while _is_open(low, high) and (middle := (low + high) // 2) in is_faster:
        low, high = (low, middle) if is_faster[middle] else (middle, high)
    return low, high


def _are_faster(
    chooser: DegreeChooser, questions: Sequence[tuple[int, Change]], *, at_once: bool
) -> list[bool]:
    """Return whether degrees `after` are allowed for so many tokens, and no slower than before."""
    allowed = [chooser.allows(tokens, change.after) for tokens, change in questions]
    left = [one for one, is_allowed in zip(questions, allowed, strict=True) if is_allowed]
    cases = [(tokens, one.after) for tokens, one in left]
    cases += [(tokens, one.before) for tokens, one in left]
    seconds = _seconds_at_once(chooser, cases) if at_once else _seconds(chooser, cases)
    after, before = seconds[: len(left)], seconds[len(left) :]
    is_faster = iter([one <= other for one, other in zip(after, before, strict=True)])
    return [is_allowed and next(is_faster) for is_allowed in allowed]


def _seconds(chooser: DegreeChooser, cases: Sequence[tuple[int, Degrees]]) -> list[float]:
    """Return the time of both phases in each case."""
    return [
        sum(
            chooser.time(phase, tokens, one).seconds
            for phase, one in zip(PHASES, degrees, strict=True)
        )
        for tokens, degrees in cases
    ]


def _seconds_at_once(chooser: DegreeChooser, cases: Sequence[tuple[int, Degrees]]) -> list[float]:
    found: list[float] = []
    for start in range(0, len(cases), FEW):
        some = cases[start : start + FEW]
        tokens = np.array([tokens for tokens, _ in some])
        each = _of_phases(chooser, tokens, np.array([degrees for _, degrees in some]).T)
        found += map(sum, zip(*each, strict=True))
    return found


def _of_phases(chooser: DegreeChooser, tokens: Ints, degrees: Ints) -> list[list[float]]:
    """Return the time of each phase in some cases.

    Args:
        degrees: of each phase, shape (phases, cases).
    """
    costs, order = chooser.costs, chooser.bounds.chosen_order
    if chooser.strategy != "none":
        return exact_seconds(costs=costs, strategy=chooser.strategy, tokens=tokens, degrees=degrees)
    times = (
        closed_times(costs=costs, phase=phase, tokens=tokens, degrees=each, order=order)
        for phase, each in zip(PHASES, degrees, strict=True)
    )
    return [one.tolist() for one in times]
