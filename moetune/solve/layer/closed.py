"""Times of phases that reuse no memory, in every number of chunks at once."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from moetune.domain.arrays import floats_of
from moetune.domain.constraints import Order
from moetune.domain.layer import Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.phase_arrays import Ints


def closed_seconds(
    *,
    costs: LayerCosts,
    phase: Phase,
    tokens: int | Ints,
    degrees: Sequence[int] | Ints,
    order: Order,
) -> list[float] | None:
    """Return the time of a phase in so many chunks: `times.phase_time`.

    Args:
        costs: take arrays.
        tokens: or those of each number of chunks.
        degrees: to the last bit where they are at most `arrays.FEW`.

    Returns:
        None where costs are absurd, and a time is no finite number.
    """
    every, mine = np.array(degrees), cast("float", tokens)
    degree = cast("int", every)
    rows = costs.rows(mine, degree=degree)
    with np.errstate(over="ignore", invalid="ignore"):
        factor = costs.step_factor(rows=rows, degree=degree)
        transfer = costs.transfer(rows=rows, degree=degree).seconds
        chunks = costs.makespan(
            degree=degree,
            rows=rows,
            transfer_seconds=factor * transfer,
            compute_seconds=factor * costs.compute(phase=phase, rows=rows).seconds,
            order=order,
        )
    seconds = costs.gathering(tokens=mine).seconds + floats_of(chunks)
    return np.broadcast_to(seconds, every.shape).tolist() if np.isfinite(seconds).all() else None
