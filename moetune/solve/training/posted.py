"""Exchanges of DeepEP over networks whose messages a thread of the host posts.

On InfiniBand the GPUs post their own messages. On EFA a thread of each rank's host does, and
messages arrive in any order: the counter that tells the receiver of a chunk of tokens waits until
the chunk has arrived. So each chunk costs a round trip, however few bytes it has.

DeepEP's kernels have a channel for every two multiprocessors; each sends its share of a rank's
tokens to each other node in chunks, whose tokens are set by the number of ranks
(deep_ep/buffer.py: `get_dispatch_config`, `get_combine_config`).
"""

import bisect
import math

from moetune.domain.reference import TransferPhase

_CHANNELS = 10
"""Of the 20 multiprocessors that DeepEP takes unless it is told otherwise."""
_RANKS = (2, 16, 24, 96)
_CHUNK_TOKENS: dict[TransferPhase, tuple[int, ...]] = {
    "dispatch": (6, 20, 8, 12),
    "combine": (6, 12, 8, 8),
}


def posted_chunks(
    phase: TransferPhase,
    *,
    num_ranks: int,
    num_nodes: int,
    tokens: float,
    reach: float,
) -> float:
    """Return the chunks that one rank sends to other nodes in a dispatch or combine.

    Args:
        num_ranks: that the experts are on, on `num_nodes` nodes.
        tokens: of the rank.
        reach: expected nodes that a token goes to, its own among them.
    """
    chunk = _CHUNK_TOKENS[phase][bisect.bisect_right(_RANKS, num_ranks) - 1]
    in_channel = tokens * reach / num_nodes / _CHANNELS
    return (num_nodes - 1) * _CHANNELS * math.ceil(in_channel / chunk)
