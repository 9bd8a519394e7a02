"""Sensitivity of a step to a part of the machine."""

from collections.abc import Callable

PERCENT = 0.01


def seconds_per_percent(step_at: Callable[[float], float]) -> float:
    """Return by how much a step is longer for each percent that a part's times are longer.

    The symmetric difference over 1 % more and 1 % less: where the step has a kink, as where the
    link and the experts take equally long, it is the mean of both sides.

    Args:
        step_at: seconds of the step by the factor on the part's times, its choice held fixed.
    """
    return (step_at(1 + PERCENT) - step_at(1 - PERCENT)) / 2
