"""Times of the exchanges of tokens with experts on other ranks, by dispatcher.

A rank has t tokens, k experts each, over ep·etp ranks in n nodes. An all-to-all sends each (token,
expert) pair over ep ranks, with a gather over the etp ones that share an expert's width behind it.
DeepEP and HybridEP send a token once to each node, and inside it once to each rank.

On InfiniBand the GPUs post their own messages. On EFA a thread of each rank's host does, and
messages arrive in any order: the counter that tells the receiver of a chunk of tokens waits until
the chunk has arrived. So each chunk costs a round trip, however few bytes it has; HybridEP is taken
to send the chunks that DeepEP does.
"""

import bisect
import math

from moetune.domain.experts import RoutedExperts
from moetune.domain.reference import TransferPhase
from moetune.domain.routing import reached
from moetune.domain.training import DEDUPLICATING, FoldedLayout
from moetune.solve.model.activations import ELEMENT
from moetune.solve.model.machine import DevicePrices, RankSpan


def reached_nodes(part: RoutedExperts, nodes: int) -> float:
    """Return the expected nodes, of n, that a token's experts are on.

    Experts are drawn independently, n·(1 − (1 − 1/n)^k), of the nodes that the chosen groups of
    experts are on where routing is limited to groups (DeepSeek-V3, §2.1.2): n·g/G where a group is
    on one node or several, and n·(1 − C(G − G/n, g) / C(G, g)) where a node has several groups.
    """
    groups, chosen = part.router.num_groups, part.router.top_groups
    allowed = nodes * chosen / groups
    if groups > nodes:
        outside = (max(0.0, 1 - groups / nodes / (groups - taken)) for taken in range(chosen))
        allowed = nodes * (1 - math.prod(outside))
    return reached(part.mean_top_k, allowed)


def exchange_seconds(
    device: DevicePrices,
    *,
    layout: FoldedLayout,
    part: RoutedExperts,
    tokens: float,
    phase: TransferPhase,
) -> float:
    """Return one dispatch or combine of a micro-batch's tokens."""
    span, row_bytes = device.span(layout.ep, layout.etp), part.d_expert * ELEMENT
    num_bytes = tokens * part.mean_top_k * row_bytes
    # The ranks that share one expert's width have all of its rows.
    seconds = _gathered(device, device.span(layout.etp, 1), num_bytes, phase)
    if span.size == 1:
        return seconds
    if layout.dispatcher == "all_gather":
        return seconds + _gathered(device, span, tokens * row_bytes, phase)
    if layout.dispatcher in DEDUPLICATING:
        return seconds + _deduplicated(device, layout, part, tokens, phase)
    return seconds + device.collective("all_to_all", span, num_bytes)


def _deduplicated(
    device: DevicePrices,
    layout: FoldedLayout,
    part: RoutedExperts,
    tokens: float,
    phase: TransferPhase,
) -> float:
    """Return an exchange that sends a token once to each node and to each rank inside it."""
    span, row_bytes = device.span(layout.ep, layout.etp), part.d_expert * ELEMENT
    rows = tokens * reached(part.mean_top_k, span.size)
    if span.nodes == 1:
        return device.collective("all_to_all", span, rows * row_bytes)
    copies = reached_nodes(part, span.nodes)
    # Between nodes, then inside them, both at once in pieces: the longer one counts.
    across, inside = RankSpan(span.nodes, span.nodes), RankSpan(span.size // span.nodes, 1)
    wire = max(
        device.collective("all_to_all", across, tokens * copies * row_bytes),
        device.collective("all_to_all", inside, rows * row_bytes),
    )
    if not device.posted_chunk_seconds:
        return wire
    chunks = posted_chunks(
        phase, num_ranks=span.size, num_nodes=span.nodes, tokens=tokens, reach=copies
    )
    return max(wire, chunks * device.posted_chunk_seconds)


def _gathered(
    device: DevicePrices, span: RankSpan, num_bytes: float, phase: TransferPhase
) -> float:
    """Return the gather of each rank's bytes, or the scatter of them back."""
    if phase == "dispatch":
        return device.collective("all_gather", span, num_bytes)
    return device.collective("reduce_scatter", span, num_bytes * span.size)


_CHANNELS = 10
"""Channels of the 20 multiprocessors that DeepEP takes by default."""
_RANKS = (2, 16, 24, 96)
_CHUNK_TOKENS: dict[TransferPhase, tuple[int, ...]] = {
    "dispatch": (6, 20, 8, 12),
    "combine": (6, 12, 8, 8),
}


def posted_chunks(
    phase: TransferPhase, *, num_ranks: int, num_nodes: int, tokens: float, reach: float
) -> float:
    """Return the chunks that one rank sends to other nodes in a dispatch or combine.

    DeepEP's kernels have a channel for every two multiprocessors; each sends its share of a rank's
    tokens to each other node in chunks, whose tokens are set by the number of ranks
    (deep_ep/buffer.py: `get_dispatch_config`, `get_combine_config`).

    Args:
        num_ranks: that the experts are on, on `num_nodes` nodes.
        reach: expected nodes that a token goes to, its own among them.
    """
    chunk = _CHUNK_TOKENS[phase][bisect.bisect_right(_RANKS, num_ranks) - 1]
    in_channel = tokens * reach / num_nodes / _CHANNELS
    return (num_nodes - 1) * _CHANNELS * math.ceil(in_channel / chunk)
