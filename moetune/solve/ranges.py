"""From the number of tokens to the degrees: Algorithm 1 of MPipeMoE, solved ahead of time.

The paper assumes that the best degree only grows with the batch. It does not: where transfers
take longer than computation, a large batch is bound by the link, which fewer chunks serve
better. With α_a = 0, 2·β_a·y = T and r·t_e(r) = r + 0.45·T the best degree is 3 at T = 18 and
2 at T = 1000. So the ranges are searched without that assumption.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Protocol

from moetune.domain.plan import Range
from moetune.solve.choice import DegreeChooser
from moetune.solve.phases import PHASES, Phase

SINGLE_TOKENS = 16
STEPS_PER_OCTAVE = 8
MIN_TOP = 2**20
HEADROOM = 4
RESOLUTION = 256
"""A change between measured curves is found to 1/256 of T: on both sides the times are equal."""

Step = tuple[int, int]
"""(tokens, the degree from there on)."""


class _Degree(Protocol):
    def __call__(self, size: int, among: range | None = None) -> int:
        """Return the best degree for so many tokens, looked for among these."""
        ...


def solve_ranges(
    *, chooser: DegreeChooser, tokens: int, forward_degree: int, backward_degree: int
) -> tuple[Range, ...]:
    """Return disjoint, sorted ranges without gaps from 1 to at least 4·tokens and 2^20.

    Every size up to 16, then 8 a factor of two, and `tokens` itself are solved; between two
    neighbours that differ the change is bisected, to the token where the costs are lines. A pair
    of changes between two equal neighbours is not seen: a degree that is best over less than a
    tenth of T.

    Args:
        tokens: the plan's own, per rank.
        forward_degree: the plan's own, which holds for `tokens`.
        backward_degree: the same.
    """
    top = max(MIN_TOP, HEADROOM * tokens)
    samples = sorted({*_samples(top), tokens})
    chosen: dict[Phase, int] = {"forward": forward_degree, "backward": backward_degree}
    resolution = top if chooser.is_closed else RESOLUTION

    def steps(phase: Phase) -> list[Step]:
        def degree(size: int, among: range | None = None) -> int:
            return chosen[phase] if size == tokens else chooser.degree(phase, size, among=among)

        solved = [(sample, degree(sample)) for sample in samples]
        changes = (_changes(degree, low, high, resolution) for low, high in pairwise(solved))
        return [solved[0], *chain.from_iterable(changes)]

    forward, backward = (steps(phase) for phase in PHASES)
    lows = sorted({low for low, _ in (*forward, *backward)})
    highs = [low - 1 for low in lows[1:]] + [top]
    return tuple(
        (low, high, _at(forward, low), _at(backward, low))
        for low, high in zip(lows, highs, strict=True)
    )


def _samples(top: int) -> Iterator[int]:
    yield from range(1, SINGLE_TOKENS + 1)
    step = 1
    while (sample := round(SINGLE_TOKENS * 2 ** (step / STEPS_PER_OCTAVE))) < top:
        yield sample
        step += 1
    yield top


def _changes(degree: _Degree, low: Step, high: Step, resolution: int) -> list[Step]:
    """Return every change found after `low` and up to `high`."""
    if low[1] == high[1]:
        return []
    if high[0] - low[0] <= max(1, low[0] // resolution):
        return [high]
    middle = (low[0] + high[0]) // 2
    among = range(min(low[1], high[1]) - 1, max(low[1], high[1]) + 2)
    between = middle, degree(middle, among)
    first = _changes(degree, low, between, resolution)
    return first + _changes(degree, between, high, resolution)


def _at(steps: Sequence[Step], tokens: int) -> int:
    """Return the degree that holds for so many tokens."""
    return steps[bisect_right(steps, tokens, key=lambda step: step[0]) - 1][1]
