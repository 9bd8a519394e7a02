"""Sensitivity of a step to a part of the machine, and the change of it that turns the choice."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PERCENT = 0.01
SLOWER = (1.05, 1.1, 1.25, 1.5, 2.0)
"""Factors on a part's times at which the choice is asked for; the turning point is between two."""
FASTER = tuple(1 / one for one in SLOWER)
_PRECISION = 2e-3
"""Of a factor at a turning point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The smallest change found of a part's times at which another choice is best.

    Args:
        factor: on the part's times; above 1 the part is slower.
        choice: the best one there.
    """

    factor: float
    choice: str


def seconds_per_percent(step_at: Callable[[float], float]) -> float:
    """Return by how much a step is longer for each percent that a part's times are longer.

    The symmetric difference over 1 % more and 1 % less: where the step has a kink, as where the
    link and the experts take equally long, it is the mean of both sides.

    Args:
        step_at: seconds of the step by the factor on the part's times, its choice held fixed.
    """
    return (step_at(1 + PERCENT) - step_at(1 - PERCENT)) / 2


def turn_of(choice_at: Callable[[float], str], factors: Sequence[float]) -> Turn | None:
    """Return where the choice first turns among growing changes; None where it never does.

    A choice that turns and turns back between two of the factors is not seen.

    Args:
        choice_at: the best choice by the factor on the part's times.
        factors: from the one nearest to 1 on, all above it or all below it.
    """
    own, same = choice_at(1.0), 1.0
    for factor in factors:
        choice = choice_at(factor)
        if choice != own:
            return _narrowed(choice_at, own, same, Turn(factor=factor, choice=choice))
        same = factor
    return None


def _narrowed(choice_at: Callable[[float], str], own: str, same: float, turn: Turn) -> Turn:
    """Return the turning point between a factor with the own choice and one with another."""
    while abs(turn.factor - same) > _PRECISION * same:
        middle = (same + turn.factor) / 2
        choice = choice_at(middle)
        if choice == own:
            same = middle
        else:
            turn = Turn(factor=middle, choice=choice)
    return turn
