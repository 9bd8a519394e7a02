"""The fewest gathers that any policy can do with, by linear programming.

Between two uses of a chunk it either stays in its place or is gathered again. What stays takes a
place at all uses in between, and there are only so many: intervals on a line, whose constraint
matrix is totally unimodular, so that the linear programme has a whole-numbered optimum. Nothing
of it is shared with the runtime or the planner, which evict by Belady's rule.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import lil_array

from moetune.domain.chunks import Use


def fewest_gathers(order: Sequence[Use], num_places: int) -> int:
    """Return the fewest gathers of one step that begins with an empty cache.

    Args:
        order: what each use needs, and what leaves after it, to be gathered again.
    """
    gaps = list(_gaps(order))
    demands = sum(len(set(use.chunks)) for use in order)
    inner = [gap for gap in gaps if gap[1] - gap[0] > 1]
    if not inner:
        return demands - len(gaps)
    covers = lil_array((len(order), len(inner)))
    for column, (begin, end) in enumerate(inner):
        for row in range(begin + 1, end):
            covers[row, column] = 1
    room = np.array([num_places - len(set(use.chunks)) for use in order])
    found = linprog(-np.ones(len(inner)), A_ub=covers.tocsr(), b_ub=room, bounds=(0, 1))
    num_in_flight = len(gaps) - len(inner) + round(float(-found.fun))
    return demands - num_in_flight


def _gaps(order: Sequence[Use]) -> Iterator[tuple[int, int]]:
    """Yield the uses before and after every time in which a chunk could stay."""
    last: dict[int, int] = {}
    for position, use in enumerate(order):
        for chunk in set(use.chunks):
            if chunk in last:
                yield last[chunk], position
            last[chunk] = position
        for chunk in use.leaves:
            last.pop(chunk, None)
