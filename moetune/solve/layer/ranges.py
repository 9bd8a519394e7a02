"""Ranges of tokens and their degrees: a table at powers of two, for batches of other sizes."""

from collections.abc import Iterator
from itertools import pairwise

from moetune.domain.layer import PHASES
from moetune.domain.plan import Range
from moetune.solve.layer.budget import Degrees
from moetune.solve.layer.choose import DegreeChooser

MIN_TOP = 2**20
HEADROOM = 4


def solve_ranges(chooser: DegreeChooser, tokens: int, degrees: Degrees) -> tuple[Range, ...]:
    """Return disjoint, sorted ranges without gaps from 1 to at least 4·tokens and 2^20.

    A range's degrees are the best ones for its geometric mean that fit its last size, and that its
    first size may have. Where nothing fits, they are those with the least memory.

    Args:
        tokens: the plan's own, per rank.
        degrees: the plan's own, forward and backward, which hold for `tokens`.
    """
    spans = [(low + 1, high) for low, high in pairwise([0, *_sizes(chooser, tokens)])]
    found: list[Range] = []
    for (low, high), chosen in zip(spans, _chosen(chooser, spans, tokens, degrees), strict=True):
        if found and found[-1][2:] == chosen:
            low = found.pop()[0]  # noqa: PLW2901 - equal neighbours are one range
        found.append((low, high, *chosen))
    return tuple(found)


def _sizes(chooser: DegreeChooser, tokens: int) -> list[int]:
    """Return the last sizes of spans, ascending.

    They are powers of two, the plan's own, those below pins, and the most that fit in 1, 2, 4 …
    chunks.
    """
    top = max(MIN_TOP, HEADROOM * tokens)
    powers = [2**step for step in range(top.bit_length())]
    sizes = {*powers, tokens, *((chooser.pinned(phase) or 1) - 1 for phase in PHASES)}
    if chooser.budget is not None:
        largest = chooser.bounds.max_degree
        for degree in (one for one in powers if one <= largest):
            degrees = degree, degree
            sizes.add(chooser.budget.most_tokens(strategy=chooser.strategy, degrees=degrees))
    return sorted({top, *(size for size in sizes if 1 <= size < top)})


def _chosen(
    chooser: DegreeChooser, spans: list[tuple[int, int]], tokens: int, degrees: Degrees
) -> Iterator[Degrees]:
    """Yield the degrees of each span."""
    for (_, high), table in zip(spans, chooser.tables(spans), strict=True):
        if high == tokens:
            yield degrees
        else:
            yield table.best() or chooser.least(high)
