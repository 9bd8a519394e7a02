"""From the number of tokens to the degrees: Algorithm 1 of MPipeMoE, solved ahead of time.

The paper assumes that the best degree only grows with the batch. It does not: where transfers
take longer than computation, a large batch is bound by the link, which fewer chunks serve
better. With α_a = 0, 2·β_a·y = T and r·t_e(r) = r + 0.45·T the best degree is 3 at T = 18 and
2 at T = 1000. So the ranges are searched without that assumption.
"""

from collections.abc import Callable, Iterator

from moetune.domain.plan import Range

SINGLE_TOKENS = 16
STEPS_PER_OCTAVE = 8
MIN_TOP = 2**20
HEADROOM = 4

Degrees = tuple[int, int]


def solve_ranges(*, degrees: Callable[[int], Degrees], tokens: int) -> tuple[Range, ...]:
    """Return disjoint, sorted ranges without gaps from 1 to at least 4·tokens and 2^20.

    Every size up to 16, then 8 a factor of two, and `tokens` itself are solved; between two
    neighbours that differ the change is bisected. A pair of changes between two equal
    neighbours is not seen: a degree that is best over less than a tenth of T.

    Args:
        degrees: tokens per rank -> (forward, backward) degrees.
        tokens: the plan's own, which is always solved.
    """
    samples = sorted({*_samples(max(MIN_TOP, HEADROOM * tokens)), tokens})
    ranges: list[Range] = []
    before = samples[0], degrees(samples[0])
    start = before[0]
    for sample in samples[1:]:
        after = sample, degrees(sample)
        for low, solved in _changes(degrees, before, after):
            ranges.append((start, low - 1, *before[1]))
            start, before = low, (low, solved)
        before = after
    return (*ranges, (start, samples[-1], *before[1]))


def _samples(top: int) -> Iterator[int]:
    yield from range(1, SINGLE_TOKENS + 1)
    step = 0
    while (sample := round(SINGLE_TOKENS * 2 ** (step / STEPS_PER_OCTAVE))) < top:
        yield sample
        step += 1
    yield top


def _changes(
    degrees: Callable[[int], Degrees], low: tuple[int, Degrees], high: tuple[int, Degrees]
) -> Iterator[tuple[int, Degrees]]:
    """Yield (first tokens, degrees) of every change found after `low` and up to `high`."""
    if low[1] == high[1]:
        return
    if high[0] - low[0] == 1:
        yield high
        return
    middle = (low[0] + high[0]) // 2
    between = middle, degrees(middle)
    yield from _changes(degrees, low, between)
    yield from _changes(degrees, between, high)
