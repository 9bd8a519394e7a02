"""Stages of a pipeline: which blocks each has, and the time of a step through them.

p pipeline ranks, v stages of each, m micro-batches. Stage s is on rank s mod p.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.architecture import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlocks:
    """Blocks of a stage.

    Args:
        counts: number of blocks of each of `Decoder.kinds`.
        has_embedding, has_head: whether it is the first or the last stage.
    """

    counts: tuple[int, ...]
    has_embedding: bool
    has_head: bool

    @property
    def num_blocks(self) -> int:
        """All of its blocks."""
        return sum(self.counts)


def cut(decoder: Decoder, num_stages: int) -> tuple[StageBlocks, ...]:
    """Return consecutive blocks by stage; where they do not divide, the ends have fewer.

    The head costs as much as a block or more, so that the last stage is the first to have fewer.
    """
    least, more = divmod(decoder.num_layers, num_stages)
    sizes = [least] * num_stages
    middle = [*range(1, num_stages - 1), 0, num_stages - 1]
    for index in middle[:more] if num_stages > 1 else []:
        sizes[index] += 1
    kinds = {block: index for index, block in enumerate(decoder.kinds)}
    order = [kinds[block] for block in decoder.blocks]
    stages, first = [], 0
    for index, size in enumerate(sizes):
        found = Counter(order[first : first + size])
        stages.append(
            StageBlocks(
                counts=tuple(found[kind] for kind in range(len(kinds))),
                has_embedding=index == 0,
                has_head=index == num_stages - 1,
            )
        )
        first += size
    return tuple(stages)


def of_rank(stages: Sequence[StageBlocks], rank: int, pp: int) -> tuple[StageBlocks, ...]:
    """Return the stages of a pipeline rank."""
    return tuple(stages[rank::pp])


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
    ranks: Sequence[float], *, vpp: int, num_micro_batches: int, send_seconds: float
) -> float:
    """Return the time of all micro-batches.

        T = m·W + (Σ w_r − W)/v + sends,  W = max w_r

    The slowest rank never waits after its first micro-batch; before it the others' shares pass
    once, and interleaved stages are shorter by v (Narayanan et al. 2021, §2.2). Sends of 1F1B stop
    both neighbours; those of interleaved 1F1B are hidden but for the filling.

    Args:
        ranks: seconds of one micro-batch on each pipeline rank, both passes of all its stages.
        send_seconds: of one micro-batch from a stage to the next.
    """
    slowest = max(ranks)
    filling = (sum(ranks) - slowest) / vpp
    pp = len(ranks)
    if pp == 1:
        return num_micro_batches * slowest
    hops = 2 * (pp - 1)
    if vpp == 1:
        hops += 2 * (num_micro_batches - 1)
    return num_micro_batches * slowest + filling + hops * send_seconds
