"""Exchanges in chunks behind the experts' computation, as moetune's MoE layer runs them.

A pass of r equal chunks takes the time of the layer's plan (`solve.layer.times`), which includes
the launches of each chunk. All layers share a plan book, and so one degree in both passes. Memory
is that of whole passes, because their rows are kept regardless of chunks.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moetune.domain.experts import RoutedExperts
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.degree import TIE
from moetune.solve.layer.times import phase_time
from moetune.solve.model.block import BlockPrices

MOST_CHUNKS = 16


class ChunkedPasses(NamedTuple):
    """Seconds of a layer's chunks with their exchanges, by number of chunks; 1 is included."""

    forward: Mapping[int, float]
    backward: Mapping[int, float]

    def saved(self, degree: int, *, repeats: bool) -> tuple[float, float]:
        """Return the seconds that chunks save in each pass; backward may repeat the forward."""
        forward, backward = (seconds[1] - seconds[degree] for seconds in self)
        return forward, backward + (forward if repeats else 0.0)


def chunked_passes(prices: BlockPrices, part: RoutedExperts, degree: int | None) -> ChunkedPasses:
    """Return a layer's passes in `degree` chunks and in one; None tries up to `MOST_CHUNKS`."""
    degrees = range(1, MOST_CHUNKS + 1) if degree is None else sorted({1, degree})
    costs, tokens = prices.layer(part)

    def seconds(phase: Phase, degree: int) -> float:
        time = phase_time(costs=costs, phase=phase, tokens=tokens, degree=degree)
        for priced in time.parts:
            prices.device.trusts.note(priced)
        return time.seconds

    return ChunkedPasses(*({r: seconds(phase, r) for r in degrees} for phase in PHASES))


def best_degree(blocks: Sequence[tuple[int, ChunkedPasses]], *, repeats: bool) -> int:
    """Return the degree with the largest total gain over blocks; the fewest chunks if they tie.

    No pass of any block may be slower than in one chunk, on any pipeline rank. The blocks are given
    with their counts in the model.
    """
    best, most = 1, 0.0
    scale = sum(count * (forward[1] + backward[1]) for count, (forward, backward) in blocks)
    for degree in range(2, MOST_CHUNKS + 1):
        gains = [block.saved(degree, repeats=repeats) for _, block in blocks]
        if any(gain < 0 for pair in gains for gain in pair):
            continue
        gained = sum(count * sum(pair) for (count, _), pair in zip(blocks, gains, strict=True))
        if gained > most + TIE * scale:
            best, most = degree, gained
    return best
