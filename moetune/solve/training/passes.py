"""Passes of a block on a rank: its modules with recomputation, launches, and hidden exchanges."""

from typing import NamedTuple

from moetune.domain.architecture import Block, Part
from moetune.domain.attention import LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingDtype
from moetune.solve.training.block_times import BlockTimes
from moetune.solve.training.modules import ModuleName
from moetune.solve.training.selective import AGAIN

_HOST_SECONDS = {
    "mixer": 1.5e-3, "latent": 2.5e-3, "dense": 0.5e-3, "routed": 3.5e-3, "tensor_parallel": 4.0e-3,
}  # fmt: skip
_ROUTED_IN_A_GRAPH = 2.0e-3
"""Of the routed experts' when the router and the order of rows are replayed; stated."""
"""Of launching both passes of a part of a block without CUDA graphs, in Megatron-Core.

Modelled: the visible public runs on H100 whose device time is far below their step's take 9.6 to
11 ms for an attention and an MoE part with tp above 1, and at most 6.8 ms with tp 1. Latent
attention has about twice the modules."""
LAUNCH_SECONDS = 12e-6
"""Of one more kernel of a list that the host goes through."""
_AGAIN_SECONDS = 0.6e-3
"""Of launching a recomputed module again: 0.3 to 1.5 ms in a block of Moonlight on H100
(Megatron-Bridge, skills/nemo-mbridge-perf-activation-recompute)."""
FORWARD_OF_BOTH = 1 / 3
"""The backward pass has twice the GEMMs."""
_OF_EXPERTS: tuple[ModuleName, ...] = (
    "experts", "moe_act", "router", "permute", "shared_experts",
)  # fmt: skip
_RECOMPUTABLE: tuple[ModuleName, ...] = (
    "core_attn", "norm", "mla_up_proj", "mlp", *_OF_EXPERTS,
)  # fmt: skip


class BlockSeconds(NamedTuple):
    """Seconds of a block for one micro-batch.

    Args:
        forward, backward: of both passes, with all of the below.
        weight: of the backward pass, what its GEMMs for the weights' gradients take.
        times: its modules.
        recomputed: of the backward pass, what is computed and exchanged again.
        launches: that the device waits for.
        hidden: of the exchanges.
        beside: of these, what shared experts hide in one chunk.
    """

    forward: float
    backward: float
    weight: float
    times: BlockTimes
    recomputed: float
    launches: float
    hidden: float
    beside: float = 0.0

    @property
    def both(self) -> float:
        """Both passes."""
        return self.forward + self.backward

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of both passes by module, which add up to them."""
        found: dict[str, float] = {
            name: one.forward + one.backward for name, one in self.times.modules.items()
        }
        if self.recomputed:
            found["recompute"] = self.recomputed
        if self.hidden:
            found["exchange"] -= self.hidden
        if self.launches:
            found["launches"] = self.launches
        return found


def host_seconds(block: Block, layout: FoldedLayout, target: Target, dtype: TrainingDtype) -> float:
    """Return the host's time to launch both passes of a block."""
    if layout.cuda_graphs == "full":
        return 0.0
    total = sum(_launches(part, layout, target, dtype) for part in block.parts)
    if layout.cuda_graphs == "none":
        total += _HOST_SECONDS["tensor_parallel"] * (layout.tp > 1)
    if {"full", "selective"} & {*layout.recompute}:
        return target.launches * total * (1 + FORWARD_OF_BOTH)
    again = block.modules & {*layout.recompute}
    return target.launches * (total + _AGAIN_SECONDS * len(again))


def _launches(part: Part, layout: FoldedLayout, target: Target, dtype: TrainingDtype) -> float:
    if isinstance(part, RoutedExperts):
        kernels = target.kernels_per_expert[dtype != "bfloat16"] * part.num_experts // layout.ep
        shared = _HOST_SECONDS["dense"] * (part.shared is not None)
        own = _HOST_SECONDS["routed"] if layout.cuda_graphs == "none" else _ROUTED_IN_A_GRAPH
        return own + shared + LAUNCH_SECONDS * kernels
    if isinstance(part, DenseFfn):
        return _HOST_SECONDS["dense"]
    if layout.cuda_graphs != "none":
        return 0.0
    return _HOST_SECONDS["latent" if isinstance(part, LatentAttention) else "mixer"]


class DevicePasses(NamedTuple):
    """Seconds that a block's passes keep the device, without exchanges.

    Args:
        recomputed: of the backward pass, what the forward pass has computed already.
    """

    forward: float
    backward: float
    recomputed: float


def device_passes(times: BlockTimes, layout: FoldedLayout) -> DevicePasses:
    """Return the seconds that a block's passes keep the device."""
    recomputed = _recomputed(times, layout)
    compute, exchange = times.compute, times.passes("exchange")
    other = times.communication.forward - exchange.forward
    other_back = times.communication.grad_input - exchange.grad_input
    backward = compute.backward + other_back + recomputed
    return DevicePasses(compute.forward + other, backward, recomputed)


def block_seconds(
    times: BlockTimes,
    layout: FoldedLayout,
    *,
    device: DevicePasses,
    slack: float,
    saved: tuple[float, float] = (0.0, 0.0),
    beside: tuple[float, float] = (0.0, 0.0),
    overlap_hidden: float = 0.0,
) -> BlockSeconds:
    """Return a block's passes, with what is recomputed, and exchanges hidden where they are.

    A block takes as long as the device or the host that launches it, whichever is longer, and then
    its exchanges: the host waits for the numbers of rows in each of them.

    Args:
        device: its passes on the device.
        slack: by how long they are longer than the host, launches of chunks counted.
        saved: by chunks, of the forward and the backward pass.
        beside: by shared experts in one chunk, of both passes; `saved` is beyond it.
        overlap_hidden: share that another micro-batch's computation hides (`Target`).
    """
    forward, backward, again = device
    exchange, repeats = times.passes("exchange"), repeats_exchange(layout)
    exchanges = exchange.forward * (2 if repeats else 1)
    waiting = max(0.0, -slack)
    if layout.overlap == "batch":
        others = forward + backward + waiting
        share = overlap_hidden * min(others, exchange.forward + exchanges) / 2
        saved = share, share
    if any(beside):
        again_beside = beside[0] if repeats else 0.0
        beside = beside[0], beside[1] + again_beside
        saved = saved[0] + beside[0], saved[1] + beside[1]
    repeated = saved[0] if repeats else 0.0
    return BlockSeconds(
        forward=forward + exchange.forward - saved[0] + FORWARD_OF_BOTH * waiting,
        backward=backward + exchanges - saved[1] + (1 - FORWARD_OF_BOTH) * waiting,
        weight=times.compute.grad_weight + FORWARD_OF_BOTH * waiting,
        times=times,
        recomputed=again + exchanges - exchange.grad_input - repeated if again else 0.0,
        launches=waiting,
        hidden=sum(saved) - repeated,
        beside=sum(beside) - (beside[0] if repeats else 0.0),
    )


def repeats_exchange(layout: FoldedLayout) -> bool:
    """Return whether the backward pass repeats the dispatch and combine of the forward pass."""
    return "full" in layout.recompute or "moe" in layout.recompute


def _recomputed(times: BlockTimes, layout: FoldedLayout) -> float:
    """Return the seconds of computation that the backward pass repeats, without exchanges."""
    if not layout.recompute:
        return 0.0
    if "full" in layout.recompute:
        other = times.communication.forward - times.passes("exchange").forward
        return times.compute.forward + other
    if "selective" in layout.recompute:
        return sum(AGAIN.get(name, 0.0) * one.forward for name, one in times.modules.items())
    again = {*layout.recompute, *(_OF_EXPERTS if "moe" in layout.recompute else ())}
    names = (name for name in _RECOMPUTABLE if name in again and name in times.modules)
    return sum(times.modules[name].forward for name in names)
