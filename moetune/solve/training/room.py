"""Seconds of a pass while which the link is idle."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from moetune.domain.training import FoldedLayout
from moetune.solve.training.passes import FORWARD_OF_BOTH, BlockSeconds, repeats_exchange
from moetune.solve.training.stages import StageBlocks, block_counts


class Room(NamedTuple):
    """Seconds that gradients and parameters can run beside, of one micro-batch's passes."""

    forward: float
    backward: float

    def divided(self, by: float) -> "Room":
        """Return so many times less room."""
        return Room(self.forward / by, self.backward / by)


NO_ROOM, WITHOUT_END = Room(0.0, 0.0), Room(math.inf, math.inf)


def computing(
    rank: StageBlocks,
    blocks: Sequence[BlockSeconds],
    ends: tuple[float, float],
    layout: FoldedLayout,
) -> Room:
    """Return the room of a rank: its passes without any communication, hidden or not.

    Args:
        blocks: of each kind.
        ends: the embedding's and a head's, both passes.
    """
    heads = rank.has_head + rank.has_predictions * (len(blocks) - len(rank.counts))
    both = rank.has_embedding * ends[0] + heads * ends[1]
    forward, backward = FORWARD_OF_BOTH * both, (1 - FORWARD_OF_BOTH) * both
    for count, one in zip(block_counts(rank, len(blocks)), blocks, strict=True):
        if count:
            sent = one.times.communication
            again = sent.forward if "full" in layout.recompute else 0.0
            if not again and repeats_exchange(layout):
                again = one.times.passes("exchange").forward
            forward += count * max(0.0, one.forward - sent.forward)
            backward += count * max(0.0, one.backward - sent.backward - again)
    return Room(forward, backward)
