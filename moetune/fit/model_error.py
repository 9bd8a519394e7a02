"""Error of predicted steps besides that of their costs, from steps predicted and measured.

A cell is one layer, number of tokens and machine, with several choices (degrees, or layouts). Its
residuals are log(measured / predicted), one for each choice. What they have in common widens a
plan's range and moves no choice; what is each choice's own also decides how sure the choice is.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from moetune.domain.costs import ModelError
from moetune.domain.step_errors import SHARED_OCTAVES
from moetune.fit.extrapolation import MEDIAN_OF_ABSOLUTE_NORMAL

OF_LAYERS = ModelError(common=0.0, own=0.068)
"""Of the network lab's record from before whole steps were measured, of sums of operations:
12 cells with five degrees each (`docs/results/netlab-sums.json`). The errors of near degrees are
alike, and those of one chunk and of many are not: nothing is common."""


def model_error_of(cells: Sequence[Sequence[float]], *, shared: float = 0.0) -> ModelError | None:
    """Return the spreads of residuals, by medians: a few wild steps do not move them.

    The own spread follows from the differences between neighbours in a cell, and all of them
    from the residuals themselves: a bias is an error, too. What the own one leaves is common.

    Args:
        cells: residuals of each cell; empty ones are omitted.
        shared: correlation of the own errors of neighbours.

    Returns:
        None without residuals.
    """
    total = _scale([one for cell in cells for one in cell])
    if total is None:
        return None
    between = _scale([one - other for cell in cells for one, other in pairwise(cell)])
    own = 0.0 if between is None else between / math.sqrt(2 * (1 - shared))
    return ModelError(common=math.sqrt(max(total**2 - own**2, 0.0)), own=own)


def error_of_degrees(cells: Sequence[Sequence[float]]) -> ModelError | None:
    """Return the spreads where a cell's choices are degrees an octave apart, in their order."""
    return model_error_of(cells, shared=1 - 1 / SHARED_OCTAVES)


def _scale(residuals: Sequence[float]) -> float | None:
    """Return the standard deviation around 0 of a normal with their median absolute value."""
    if not residuals:
        return None
    return statistics.median(map(abs, residuals)) / MEDIAN_OF_ABSOLUTE_NORMAL
