"""Stages of a pipeline: which blocks each rank has, and the time of a step through them.

p pipeline ranks, v stages of each, m micro-batches. Stage s is on rank s mod p.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from moetune.domain.architecture import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBlocks:
    """Blocks of pipeline ranks that have the same.

    Args:
        counts: number of blocks of each of `Decoder.kinds`.
        has_embedding, has_head: whether the first or the last stage is among its stages.
        ranks: the pipeline ranks, ascending.
    """

    counts: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecoderStages:
    """A decoder's stages, each cut made once. Not safe for several threads."""

    decoder: Decoder
    _known: dict[tuple[int, int], tuple[RankBlocks, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    def of(self, pp: int, vpp: int) -> tuple[RankBlocks, ...]:
        """Return the blocks of the pipeline ranks; ranks with the same are one."""
        found = self._known.get((pp, vpp))
        if found is None:
            found = self._known[pp, vpp] = self._cut(pp, vpp)
        return found

    def _cut(self, pp: int, vpp: int) -> tuple[RankBlocks, ...]:
        kinds = {block: index for index, block in enumerate(self.decoder.kinds)}
        order = [kinds[block] for block in self.decoder.blocks]
        counts: list[Counter[int]] = [Counter() for _ in range(pp)]
        first = 0
        for stage, size in enumerate(stage_sizes(self.decoder.num_layers, pp * vpp)):
            counts[stage % pp].update(order[first : first + size])
            first += size
        same: dict[tuple[tuple[int, ...], bool, bool], list[int]] = {}
        for rank, found in enumerate(counts):
            every = tuple(found[kind] for kind in range(len(kinds)))
            same.setdefault((every, rank == 0, rank == pp - 1), []).append(rank)
        return tuple(
            RankBlocks(counts=every, has_embedding=begins, has_head=ends, ranks=tuple(ranks))
            for (every, begins, ends), ranks in same.items()
        )


def stage_sizes(num_layers: int, num_stages: int) -> list[int]:
    """Return the blocks of each stage; where they do not divide, the ends have fewer.

    The head costs as much as a block or more, so that the last stage is the first to have fewer.
    """
    least, more = divmod(num_layers, num_stages)
    sizes = [least] * num_stages
    middle = [*range(1, num_stages - 1), 0] if num_stages > 1 else []
    for index in middle[:more]:
        sizes[index] += 1
    return sizes


def live_micro_batches(*, rank: int, pp: int, vpp: int, num_micro_batches: int) -> float:
    """Return how many micro-batches' activations a rank keeps at most, in whole ranks' worth.

    1F1B keeps p − r; interleaved 1F1B 2·(p − r − 1) + (v − 1)·p + 1 of its stages, each 1/v of the
    rank's blocks (Megatron-Core's warm-up, and one in work).
    """
    if vpp == 1:
        return min(num_micro_batches, pp - rank)
    warm_up = 2 * (pp - rank - 1) + (vpp - 1) * pp + 1
    return min(num_micro_batches * vpp, warm_up) / vpp


def pipeline_seconds(
    ranks: Sequence[tuple[float, int]], *, vpp: int, num_micro_batches: int, send_seconds: float
) -> float:
    """Return the time of all micro-batches.

        T = m·W + (Σ w_r − W)/v + sends,  W = max w_r

    The slowest rank never waits after its first micro-batch; before it the others' shares pass
    once, and interleaved stages are shorter by v (Narayanan et al. 2021, §2.2). Sends of 1F1B stop
    both neighbours; those of interleaved 1F1B are hidden but for the filling.

    Args:
        ranks: (seconds of one micro-batch, both passes of all its stages; number of such ranks).
        send_seconds: of one micro-batch from a stage to the next.
    """
    slowest = max(seconds for seconds, _ in ranks)
    pp = sum(count for _, count in ranks)
    if pp == 1:
        return num_micro_batches * slowest
    filling = (sum(seconds * count for seconds, count in ranks) - slowest) / vpp
    hops = 2 * (pp - 1)
    if vpp == 1:
        hops += 2 * (num_micro_batches - 1)
    return num_micro_batches * slowest + filling + hops * send_seconds
