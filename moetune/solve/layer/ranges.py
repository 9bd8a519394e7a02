"""Ranges of tokens and their degrees: exact where costs are lines, few where they are measured."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise

from moetune.domain.layer import PHASES, Phase
from moetune.domain.plan import Range
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.fewest_ranges import fewest_ranges
from moetune.solve.layer.room import Room

SINGLE_TOKENS = 16
STEPS_PER_OCTAVE = 8
STEPS_WHERE_SIMULATED = 2
MIN_TOP = 2**20
HEADROOM = 4

Step = tuple[int, int]
"""(tokens, the degree from there on)."""


def solve_ranges(
    *, chooser: DegreeChooser, tokens: int, forward_degree: int, backward_degree: int
) -> tuple[Range, ...]:
    """Return disjoint, sorted ranges without gaps from 1 to at least 4·tokens and 2^20.

    Where the costs are lines, every size up to 16, then 8 a factor of two, and `tokens` itself
    are solved; between two neighbours that differ the change is bisected to the token. A pair of
    changes between two equal neighbours is not seen: a degree that is best over less than a
    tenth of T. Where costs are measured, degrees that are as good as the best at the same sizes
    are held as long as they are (`fewest_ranges`). Where memory is reused every degree has to be
    simulated, and two sizes a factor of two are solved.

    Args:
        tokens: the plan's own, per rank.
        forward_degree: the plan's own, which holds for `tokens`.
        backward_degree: the same.
    """
    top = max(MIN_TOP, HEADROOM * tokens)
    if not chooser.is_closed:
        few = STEPS_PER_OCTAVE if chooser.strategy == "none" else STEPS_WHERE_SIMULATED
        sizes = {*_samples(top, few), *_limits(chooser, top), tokens}
        own = forward_degree, backward_degree
        return fewest_ranges(chooser=chooser, sizes=sorted(sizes), tokens=tokens, own=own)
    samples = sorted({*_samples(top, STEPS_PER_OCTAVE), tokens})
    chosen: dict[Phase, int] = {"forward": forward_degree, "backward": backward_degree}
    degrees = cache(chooser.degrees)

    def steps(phase: Phase) -> list[Step]:
        def degree(size: int) -> int:
            return chosen[phase] if size == tokens else degrees(size)[PHASES.index(phase)]

        solved = [(sample, degree(sample)) for sample in samples]
        changes = (_changes(degree, low, high) for low, high in pairwise(solved))
        return [solved[0], *chain.from_iterable(changes)]

    forward, backward = (steps(phase) for phase in PHASES)
    lows = sorted({low for low, _ in (*forward, *backward)})
    highs = [low - 1 for low in lows[1:]] + [top]
    return tuple(
        (low, high, _at(forward, low), _at(backward, low))
        for low, high in zip(lows, highs, strict=True)
    )


def _samples(top: int, steps_per_octave: int) -> Iterator[int]:
    yield from range(1, SINGLE_TOKENS + 1)
    step = 1
    while (sample := round(SINGLE_TOKENS * 2 ** (step / steps_per_octave))) < top:
        yield sample
        step += 1
    yield top


def _limits(chooser: DegreeChooser, top: int) -> Iterator[int]:
    """Yield the sizes at which the allowed degrees change, and their neighbours."""
    for phase in PHASES:
        yield from range(1, min(chooser.bounds.pinned(phase) or 1, top) + 1)
    if chooser.room is not None:
        yield from (size for size in _fitting_sizes(chooser, chooser.room) if 1 <= size < top)


def _fitting_sizes(chooser: DegreeChooser, room: Room) -> Iterator[int]:
    """Yield the most tokens that fit in 1, 2, 4, … chunks, and one more."""
    degree = 1
    while degree <= chooser.bounds.max_degree:
        paired = chooser.is_paired
        most = room.most_tokens((degree, degree)) if paired else room.most_tokens_from(degree)
        yield from (most, most + 1)
        degree *= 2


def _changes(degree: Callable[[int], int], low: Step, high: Step) -> list[Step]:
    """Return every change found after `low` and up to `high`."""
    if low[1] == high[1]:
        return []
    if high[0] - low[0] == 1:
        return [high]
    middle = (low[0] + high[0]) // 2
    between = middle, degree(middle)
    return _changes(degree, low, between) + _changes(degree, between, high)


def _at(steps: Sequence[Step], tokens: int) -> int:
    """Return the degree that holds for so many tokens."""
    return steps[bisect_right(steps, tokens, key=lambda step: step[0]) - 1][1]
