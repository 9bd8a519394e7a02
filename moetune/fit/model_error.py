"""Error of predicted steps besides that of their costs, from steps predicted and measured.

A cell is one layer, number of tokens and machine, with several choices (degrees, or layouts). Its
residuals are log(measured / predicted), one for each choice. What they have in common widens a
plan's range and moves no choice; what is each choice's own also decides how sure the choice is.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from moetune.domain.costs import SHARED_BY_OCTAVES, ModelError
from moetune.domain.records import Observation
from moetune.fit.extrapolation import MEDIAN_OF_ABSOLUTE_NORMAL

OF_LAYERS = ModelError(common=0.0, own=0.068)
"""Of the network lab's record: 12 cells with five degrees each (`docs/results/netlab.json`). The
errors of near degrees are alike, and those of one chunk and of many are not: nothing is common."""
OF_MODELS = ModelError(common=0.095, own=0.050)
"""Of its record of layouts: four cells with nine each (`docs/results/layouts.json`)."""
PRIOR_CELLS = 4
"""Cells that the record counts for against those observed on the machine itself."""


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
    return model_error_of(cells, shared=SHARED_BY_OCTAVES)


def cells_of(observations: Iterable[Observation]) -> tuple[tuple[float, ...], ...]:
    """Return the residuals of observed steps, one for each choice of a plan and size.

    Steps without a time, or without a prediction, are omitted.

    Args:
        observations: of plans of one machine.
    """
    found: dict[tuple[str, int], dict[tuple[int, int], list[float]]] = {}
    for one in observations:
        seconds = statistics.median(one.seconds)
        if seconds and one.predicted_seconds:
            cell = found.setdefault((one.plan_id, one.tokens_per_rank), {})
            choice = cell.setdefault((one.forward_degree, one.backward_degree), [])
            choice.append(math.log(seconds / one.predicted_seconds))
    return tuple(
        tuple(statistics.median(cell[choice]) for choice in sorted(cell)) for cell in found.values()
    )


def observed_error(cells: Sequence[Sequence[float]], *, record: ModelError) -> ModelError:
    """Return the error on a machine whose steps were observed: its own, and the record's.

    Variances are weighted by cells, the record's as `PRIOR_CELLS` of them, so that few
    observations change little and many decide.

    Args:
        cells: residuals observed there.
    """
    found = model_error_of(cells)
    if found is None:
        return record
    num_cells = sum(map(bool, cells))
    num_several = sum(len(cell) > 1 for cell in cells)
    return ModelError(
        common=_weighted(found.common, num_cells, record.common),
        own=_weighted(found.own, num_several, record.own),
    )


def _scale(residuals: Sequence[float]) -> float | None:
    """Return the standard deviation around 0 of a normal with their median absolute value."""
    if not residuals:
        return None
    return statistics.median(map(abs, residuals)) / MEDIAN_OF_ABSOLUTE_NORMAL


def _weighted(observed: float, num_cells: int, recorded: float) -> float:
    total = num_cells * observed**2 + PRIOR_CELLS * recorded**2
    return math.sqrt(total / (num_cells + PRIOR_CELLS))
