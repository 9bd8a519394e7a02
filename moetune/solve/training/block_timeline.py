"""Timeline of one block for one micro-batch: its modules in order, with what is hidden beside."""

from collections.abc import Iterator, Mapping, Sequence

from moetune.solve.layer.timeline import Span, Timeline
from moetune.solve.training.modules import COMMUNICATION, BlockTimes, ModuleName
from moetune.solve.training.passes import FORWARD_OF_BOTH, BlockSeconds

COMPUTE, EXCHANGE, HIDDEN = "compute", "communication", "hidden"
_ORDER: tuple[ModuleName, ...] = (
    "norm", "attention", "mla_up_proj", "context_comm", "core_attn", "tensor_comm", "mlp",
    "router", "permute", "exchange", "shared_experts", "experts", "moe_act",
)  # fmt: skip
_ROUNDING = 1e-12
"""Sums of the same floats in another order."""


def block_timeline(times: BlockTimes, seconds: BlockSeconds) -> tuple[Timeline, Timeline]:
    """Return the forward and the backward pass of a block.

    Each module is drawn once, in the order of the data, although norms and exchanges come several
    times in a block. What is hidden of exchanges is drawn beside the experts, and beside shared
    ones where they hide it; a pass is as long as its layout's price says.

    Args:
        seconds: of the same block under a layout, with recomputation, launches and what is hidden.
    """
    recomputed, launches = (seconds.parts.get(name, 0.0) for name in ("recompute", "launches"))
    forward = _pass(
        {name: one.forward for name, one in times.modules.items()},
        {"launches": FORWARD_OF_BOTH * launches}, _ORDER, seconds.forward,
        beside="shared_experts" if seconds.beside > 0 else "experts",
    )  # fmt: skip
    backward = _pass(
        {name: one.backward for name, one in times.modules.items()},
        {"recompute": recomputed, "launches": (1 - FORWARD_OF_BOTH) * launches},
        (*reversed(_ORDER),), seconds.backward,
        beside="shared_experts" if seconds.beside >= seconds.hidden > 0 else "experts",
    )  # fmt: skip
    return forward, backward


def _pass(
    modules: Mapping[ModuleName, float], more: Mapping[str, float],
    order: Sequence[ModuleName], total: float, *, beside: ModuleName,
) -> Timeline:  # fmt: skip
    """Return the spans of a pass; exchanges are as much shorter as the pass than its parts.

    Args:
        beside: the module with which what is hidden begins.
    """
    hidden = sum(modules.values()) + sum(more.values()) - total
    hidden = min(hidden if hidden > _ROUNDING * total else 0.0, modules.get("exchange", 0.0))
    spans = [*_spans(modules, more, order, hidden)]
    last = max((one.end_seconds for one in spans), default=0.0)
    if hidden:
        start = next((one.start_seconds for one in spans if one.name == beside), 0.0)
        spans.append(Span("exchange", "comm", HIDDEN, start, min(start + hidden, last)))
    return Timeline(spans=tuple(spans), makespan_seconds=last)


def _spans(
    modules: Mapping[ModuleName, float], more: Mapping[str, float],
    order: Sequence[ModuleName], hidden: float,
) -> Iterator[Span]:  # fmt: skip
    at = more.get("recompute", 0.0)
    if at:
        yield Span("recompute", "comp", COMPUTE, 0.0, at)
    for name in order:
        length = modules.get(name, 0.0) - (hidden if name == "exchange" else 0.0)
        if length > 0:
            is_sent = name in COMMUNICATION
            yield Span(
                name, "comm" if is_sent else "comp", EXCHANGE if is_sent else COMPUTE,
                at, at + length,
            )  # fmt: skip
            at += length
    if waits := more.get("launches", 0.0):
        yield Span("launches", "mem", COMPUTE, at, at + waits)
