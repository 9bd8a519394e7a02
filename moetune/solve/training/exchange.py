"""Times of the exchanges of tokens with experts on other ranks, by dispatcher.

A rank has t tokens, k experts each, over ep·etp ranks in n nodes. An all-to-all sends each (token,
expert) pair; deduplicating dispatchers (DeepEP, HybridEP, and the hierarchical one) send a token
once to each node that has one of its experts, and copy it inside the node.
"""

from typing import Literal

from moetune.domain.experts import RoutedExperts
from moetune.domain.training import FoldedLayout
from moetune.solve.training.machine import Device, Span

Phase = Literal["dispatch", "combine"]
_ELEMENT = 2
DEDUPLICATING = frozenset({"deepep", "hybrid_ep", "hierarchical"})


def reached_nodes(part: RoutedExperts, nodes: int) -> float:
    """Return the expected nodes, of n, that a token's experts are on.

    Experts are drawn independently, n·(1 − (1 − 1/n)^k), of at most the nodes that the chosen
    groups of experts are on where routing is limited to groups (DeepSeek-V3, §2.1.2).
    """
    router = part.router
    allowed = float(nodes)
    if router.num_groups > 1:
        allowed = min(allowed, max(1.0, nodes * router.top_groups / router.num_groups))
    return allowed * (1 - (1 - 1 / allowed) ** part.mean_top_k) if allowed > 1 else 1.0


def exchange_seconds(
    device: Device, *, layout: FoldedLayout, part: RoutedExperts, tokens: float, phase: Phase
) -> float:
    """Return one dispatch or combine of a micro-batch's tokens.

    Args:
        tokens: of the rank.
    """
    span = device.span(layout.ep, layout.etp)
    row_bytes = part.d_expert * _ELEMENT
    seconds = _shared_width(device, layout, tokens * part.mean_top_k * row_bytes, phase)
    if span.size == 1:
        return seconds
    if layout.dispatcher == "all_gather":
        op = "all_gather" if phase == "dispatch" else "reduce_scatter"
        size = tokens * row_bytes * (1 if phase == "dispatch" else span.size)
        return seconds + device.collective(op, span, size)
    rows = tokens * part.mean_top_k
    if layout.dispatcher == "all_to_all" or span.nodes == 1:
        return seconds + device.collective("all_to_all", span, rows * row_bytes)
    return seconds + _in_two_steps(device, span, part, tokens, row_bytes)


def _in_two_steps(
    device: Device, span: Span, part: RoutedExperts, tokens: float, row_bytes: float
) -> float:
    """Return an exchange that crosses between nodes once a token and node, then inside them.

    Both steps run at once, in pieces: the longer one counts.
    """
    copies = reached_nodes(part, span.nodes)
    across = device.collective(
        "all_to_all", Span(size=span.nodes, nodes=span.nodes), tokens * copies * row_bytes
    )
    inside = device.collective(
        "all_to_all", Span(size=span.size // span.nodes, nodes=1),
        tokens * part.mean_top_k * row_bytes,
    )  # fmt: skip
    return max(across, inside)


def _shared_width(device: Device, layout: FoldedLayout, num_bytes: float, phase: Phase) -> float:
    """Return the gather or scatter over the ranks that share one expert's width."""
    span = device.span(layout.etp, 1)
    if phase == "dispatch":
        return device.collective("all_gather", span, num_bytes)
    return device.collective("reduce_scatter", span, num_bytes * span.size)
