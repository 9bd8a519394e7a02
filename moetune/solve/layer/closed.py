"""Times of phases that reuse no memory, in every number of chunks at once."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from moetune.domain.arrays import Floats, floats_of
from moetune.domain.constraints import Order
from moetune.domain.layer import Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.phase_arrays import Ints


def closed_seconds(
    *, costs: LayerCosts, phase: Phase, tokens: int, degrees: Sequence[int], order: Order
) -> list[float] | None:
    """Return the time of a phase in so many chunks: `times.phase_time`.

    Args:
        costs: take arrays.
        degrees: to the last bit where they are at most `arrays.FEW`.

    Returns:
        None where costs are absurd, and a time is no finite number.
    """
    every = np.array(degrees)
    seconds = closed_times(
        costs=costs, phase=phase, tokens=np.full(every.shape, tokens), degrees=every, order=order
    )
    return seconds.tolist() if np.isfinite(seconds).all() else None


@np.errstate(over="ignore", invalid="ignore")
def closed_times(
    *, costs: LayerCosts, phase: Phase, tokens: Ints, degrees: Ints, order: Order
) -> Floats:
    """Return the time of a phase with so many tokens in so many chunks, in each case.

    Absurd costs make times that are infinite or no numbers.

    Args:
        costs, degrees: as of `closed_seconds`.
        tokens: on each rank, of the shape of `degrees`.
    """
    size, degree = cast("float", tokens), cast("int", degrees)
    rows = costs.rows(size, degree=degree)
    factor = costs.step_factor(rows=rows, degree=degree)
    transfer = costs.transfer(rows=rows, degree=degree).seconds
    chunks = costs.makespan(
        degree=degree,
        rows=rows,
        transfer_seconds=factor * transfer,
        compute_seconds=factor * costs.compute(phase=phase, rows=rows).seconds,
        order=order,
    )
    seconds: Floats = costs.gathering(tokens=size).seconds + floats_of(chunks)
    return seconds
