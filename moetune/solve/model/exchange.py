"""Times of exchanges of tokens with experts on other ranks, by dispatcher.

A rank has t tokens with k experts each, over ep·etp ranks in n nodes. An all-to-all sends each
(token, expert) pair over ep ranks. Behind it follows a gather over the etp ranks that share an
expert's width. DeepEP and HybridEP send a token once to each node, and there once to each rank.

On InfiniBand the GPUs post their messages themselves. On EFA a thread of each rank's host does, and
messages arrive in any order. The counter that tells the receiver of a chunk of tokens waits until
the chunk has arrived. So each chunk costs a round trip, however few bytes it has. HybridEP is
assumed to send the same chunks as DeepEP.
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
    """Return the expected number of nodes, of n, that hold a token's experts.

    Experts are drawn independently from the allowed nodes: n·(1 − (1 − 1/n)^k) for all nodes. If
    routing is limited to groups of experts (DeepSeek-V3, §2.1.2), these are nodes of chosen groups:
    n·g/G if a group has one or more nodes, n·(1 − C(G − G/n, g) / C(G, g)) if a node has several.
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
    """Return the time of one dispatch or combine of a micro-batch's tokens."""
    span, row_bytes = device.span(layout.ep, layout.etp), part.d_expert * ELEMENT
    num_bytes = tokens * part.mean_top_k * row_bytes
    # The ranks that share an expert's width have all of its rows.
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
    """Return the time to send a token once to each node, and once to each rank inside it."""
    span, row_bytes = device.span(layout.ep, layout.etp), part.d_expert * ELEMENT
    rows = tokens * reached(part.mean_top_k, span.size)
    if span.nodes == 1:
        return device.collective("all_to_all", span, rows * row_bytes)
    copies = reached_nodes(part, span.nodes)
    # Pieces go between nodes and then inside them, both at once: the longer time counts.
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
    """Return the time to gather each rank's bytes, or to reduce-scatter them back."""
    if phase == "dispatch":
        return device.collective("all_gather", span, num_bytes)
    return device.collective("reduce_scatter", span, num_bytes * span.size)


_CHANNELS = 10
"""Channels of the 20 multiprocessors that DeepEP uses by default."""
_RANKS = (2, 16, 24, 96)
_CHUNK_TOKENS: dict[TransferPhase, tuple[int, ...]] = {
    "dispatch": (6, 20, 8, 12),
    "combine": (6, 12, 8, 8),
}


def posted_chunks(
    phase: TransferPhase, *, num_ranks: int, num_nodes: int, tokens: float, reach: float
) -> float:
    """Return the chunks that one rank sends to other nodes in a dispatch or combine.

    DeepEP's kernels have a channel for every two multiprocessors. Each channel sends its share of a
    rank's tokens to each other node in chunks; the number of ranks sets a chunk's tokens
    (deep_ep/buffer.py: `get_dispatch_config`, `get_combine_config`).

    Args:
        num_ranks: ranks that the experts are on, on `num_nodes` nodes.
        reach: expected nodes that a token goes to, including its source node.
    """
    chunk = _CHUNK_TOKENS[phase][bisect.bisect_right(_RANKS, num_ranks) - 1]
    in_channel = tokens * reach / num_nodes / _CHANNELS
    return (num_nodes - 1) * _CHANNELS * math.ceil(in_channel / chunk)
