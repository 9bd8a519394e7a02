"""Passes of a block on a rank: modules, recomputation, launches and hidden exchanges."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moetune.domain.architecture import Block, Mixer, Part
from moetune.domain.attention import CompressedAttention, GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.targets import Target
from moetune.domain.training import HALF_PRECISION, FoldedLayout, TrainingDtype, TrainingJob
from moetune.domain.tuning import adapted_matrices

ModuleName = Literal[
    "attention", "mla_up_proj", "core_attn", "norm", "mlp", "router", "experts", "moe_act",
    "shared_experts", "permute", "exchange", "tensor_comm", "context_comm", "launches",
]  # fmt: skip
COMMUNICATION: frozenset[ModuleName] = frozenset({"exchange", "tensor_comm", "context_comm"})
CHUNK_TOKENS = 128
"""Tokens in a chunk of a recurrence."""
_WINDOW_TILE = 128
"""Keys that a kernel computes outside a sliding window: half a tile at either end, twice."""
_HOST_SECONDS = {"mixer": 1.5e-3, "latent": 3.2e-3, "dense": 0.5e-3, "routed": 3.5e-3}
"""Seconds to launch both passes of a part of a block without CUDA graphs, in Megatron-Core.

The values are modelled on public H100 runs whose device time is far below their step. There an
attention and an MoE part take 8 to 12 ms with tp above 1, and at most 6.8 ms with tp 1. Latent
attention has about twice the modules (Moonlight with tp 2, Kimi-K2 and DeepSeek-V3)."""
_TENSOR_PARALLEL = {"mixer": 1.2e-3, "latent": 2.0e-3, "dense": 1.1e-3, "routed": 2.8e-3}
"""Additional seconds with tp above 1: dense blocks of Qwen3-8B take 4.3 ms in all at tp 4 and 8 on
H100 (BastiaanGroot/ML-Infrastructure-Engineer)."""
_ROUTED_IN_A_GRAPH = 2.0e-3
"""Seconds to launch routed experts if graphs replay the router and the permute; stated."""
_EXPERT_KERNEL_SECONDS = 8e-6
"""Seconds to launch a kernel of one expert: 64 experts a rank in 8 bits (Nemotron-3 Super, 26.04 to
26.08)."""
LAUNCH_SECONDS = 12e-6
"""Seconds to launch another kernel of a list that the host goes through."""
_IDLE_SECONDS = 0.25e-3
"""Seconds, over both passes, from the host's wait for the numbers of rows to the first kernel after
it: Hy3-295B on GB300 with partial graphs of each block, and with a graph of the whole iteration
(yangwhale/gpu-tpu-pedia, hy3-12 and hy3-07)."""
_KERNELS_PER_ADAPTER = 11
"""Kernels of both passes: two products, a factor, a sum; four products, a factor, two sums."""
_AGAIN_SECONDS = 0.6e-3
"""Seconds to launch a recomputed module again: 0.3 to 1.5 ms in a block of Moonlight on H100
(Megatron-Bridge, skills/nemo-mbridge-perf-activation-recompute)."""
FORWARD_OF_BOTH = 1 / 3
"""Share of the forward pass in both; the backward pass has twice the GEMMs."""
_OF_EXPERTS: tuple[ModuleName, ...] = ("experts", "moe_act", "router", "permute", "shared_experts")
_RECOMPUTABLE: tuple[ModuleName, ...] = ("core_attn", "norm", "mla_up_proj", "mlp", *_OF_EXPERTS)
_AGAIN: Mapping[ModuleName, float] = {
    "attention": 1 / 2, "mla_up_proj": 1 / 2, "mlp": 1 / 2, "shared_experts": 1 / 2, "norm": 1.0,
    "router": 1.0, "permute": 1.0, "experts": 1.0, "moe_act": 1.0,
}  # fmt: skip
"""Share of a module's forward pass that torchtitan's selective recomputation repeats."""


def head_dim_of(part: Mixer) -> float:
    """Return the mean width of a head's queries and values."""
    if isinstance(part, LatentAttention):
        return (part.nope_dim + part.rope_dim + part.v_head_dim) / 2
    if isinstance(part, GroupedQueryAttention):
        return (part.head_dim + part.v_head_dim) / 2
    return part.head_dim if isinstance(part, CompressedAttention) else math.inf


def computed_keys(part: Mixer) -> float:
    """Return the products of an attention kernel over those that its window needs."""
    if isinstance(part, GroupedQueryAttention | LatentAttention) and part.window is not None:
        return 1 + _WINDOW_TILE / part.window
    return 1.0


def projections_of(part: Mixer, d_model: int) -> Iterator[tuple[ModuleName, int, int, bool]]:
    """Yield (module, inputs, outputs, whether tensor parallelism cuts it) of a mixer's matrices.

    A matrix that is cut along its inputs is given with inputs and outputs swapped, which takes the
    same time.
    """
    widths = part.widths
    output = widths.get("output", 0)
    if isinstance(part, LatentAttention):
        if widths["q_latent"]:
            yield "attention", d_model, widths["q_latent"] + widths["kv_latent"], False
            yield "mla_up_proj", widths["q_latent"], widths["q"], True
        else:
            yield "attention", d_model, widths["q"], True
            yield "attention", d_model, widths["kv_latent"], False
        heads = part.num_heads * (part.nope_dim + part.v_head_dim)
        yield "mla_up_proj", part.kv_rank, heads, True
    elif isinstance(part, CompressedAttention):
        yield "attention", d_model, widths["q_latent"] + widths["kv"], False
        yield "attention", widths["q_latent"], widths["q"], True
        yield "attention", output // part.out_groups, part.out_groups * part.out_rank, True
        output = widths["output_latent"]
    else:
        inner = sum(width for name, width in widths.items() if name != "output")
        yield "attention", d_model, inner, True
    yield "attention", d_model, output, True


class Passes(NamedTuple):
    """Seconds of a module's passes; addition adds each pass."""

    forward: float = 0.0
    grad_input: float = 0.0
    grad_weight: float = 0.0

    def __add__(self, addend: "Passes") -> "Passes":  # type: ignore[override]  # of passes, not of tuples
        return Passes(self[0] + addend[0], self[1] + addend[1], self[2] + addend[2])

    @property
    def backward(self) -> float:
        """Seconds of both gradients."""
        return self.grad_input + self.grad_weight

    @property
    def frozen(self) -> "Passes":
        """The passes without gradients of the weights."""
        return Passes(self.forward, self.grad_input)


NO_TIME = Passes()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Seconds of a block's modules, or of some of them, for one micro-batch.

    Args:
        compute, communication: totals over modules, kept because a search asks for every layout.
    """

    modules: Mapping[ModuleName, Passes]
    compute: Passes
    communication: Passes

    @classmethod
    def of(cls, modules: Iterable[tuple[ModuleName, Passes]]) -> "BlockTimes":
        """Return the times of modules; modules of the same name are added up."""
        by_name: dict[ModuleName, Passes] = {}
        compute = communication = NO_TIME
        for name, passes in modules:
            by_name[name] = by_name[name] + passes if name in by_name else passes
            if name in COMMUNICATION:
                communication += passes
            else:
                compute += passes
        return cls(modules=by_name, compute=compute, communication=communication)

    def __add__(self, addend: "BlockTimes") -> "BlockTimes":
        return BlockTimes.of((*self.modules.items(), *addend.modules.items()))

    def passes(self, name: ModuleName) -> Passes:
        """Return a module's passes; zero if the block lacks the module."""
        return self.modules.get(name, NO_TIME)


class BlockSeconds(NamedTuple):
    """Seconds of a block for one micro-batch.

    Args:
        forward, backward: seconds of the passes, including all parts below.
        weight: part of the backward pass in GEMMs for the weights' gradients.
        recomputed: part of the backward pass that is computed and exchanged again.
        launches: launch time that the device waits for.
        hidden: hidden part of the exchanges.
        bound_by_host: part of both passes that takes as long as the host's launches.
    """

    forward: float
    backward: float
    weight: float
    times: BlockTimes
    recomputed: float
    launches: float
    hidden: float
    bound_by_host: float = 0.0

    @property
    def both(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of both passes by module; they add up to `both`."""
        parts: dict[str, float] = {
            name: passes.forward + passes.backward for name, passes in self.times.modules.items()
        }
        if self.recomputed:
            parts["recompute"] = self.recomputed
        if self.hidden:  # exceeds all exchanges if smaller chunks compute faster
            more = max(0.0, self.hidden - parts["exchange"])
            parts["exchange"] -= self.hidden - more
            parts["experts"] -= more
        if self.launches:
            parts["launches"] = parts.get("launches", 0.0) + self.launches
        return parts


def host_seconds(
    block: Block, layout: FoldedLayout, target: Target, job: TrainingJob,
    routed: float | None = None,
) -> float:  # fmt: skip
    """Return the host's time to launch both passes of a block; `routed` replaces its experts'."""
    if layout.cuda_graphs == "full":
        return 0.0
    total = sum(_launches(part, layout, target, job.dtype, routed) for part in block.parts)
    if job.tuning.adapters is not None:
        matrices = (
            matrix for part in block.parts if job.tuning.adapter(part)
            for matrix in adapted_matrices(part, fuses=target.core is not None)
        )  # fmt: skip
        total += LAUNCH_SECONDS * _KERNELS_PER_ADAPTER * sum(1 for _ in matrices)
    if {"full", "selective"} & {*layout.recompute}:
        return target.launches * total * (1 + FORWARD_OF_BOTH)
    again = block.modules & {*layout.recompute}
    return target.launches * (total + _AGAIN_SECONDS * len(again))


def idle_seconds(part: RoutedExperts | None, layout: FoldedLayout) -> float:
    """Return the time that the device idles for kernels launched after a count of rows."""
    if part is None or layout.ep == 1 or layout.cuda_graphs == "full":
        return 0.0
    return _IDLE_SECONDS


def _launches(
    part: Part, layout: FoldedLayout, target: Target, dtype: TrainingDtype, of_layer: float | None
) -> float:
    is_plain = layout.cuda_graphs == "none"
    if isinstance(part, RoutedExperts):
        kernels = (
            target.kernels_per_expert[dtype not in HALF_PRECISION] * part.num_experts // layout.ep
        )
        shared = _HOST_SECONDS["dense"] * (part.shared is not None)
        if of_layer is not None:
            return of_layer + shared
        routed = _of_part("routed", layout)
        if not is_plain:
            routed -= _HOST_SECONDS["routed"] - _ROUTED_IN_A_GRAPH
        return routed + shared + _EXPERT_KERNEL_SECONDS * kernels
    if isinstance(part, DenseFfn):
        return _of_part("dense", layout) if is_plain else _HOST_SECONDS["dense"]
    if not is_plain:
        return 0.0
    return _of_part("latent" if isinstance(part, LatentAttention) else "mixer", layout)


def _of_part(name: str, layout: FoldedLayout) -> float:
    return _HOST_SECONDS[name] + (_TENSOR_PARALLEL[name] if layout.tp > 1 else 0.0)


class DevicePasses(NamedTuple):
    """Seconds that a block's passes occupy the device, without exchanges.

    Args:
        recomputed: part of the backward pass that repeats the forward pass.
        slack: time by which both passes exceed the host's time to launch them.
    """

    times: BlockTimes
    forward: float
    backward: float
    recomputed: float
    slack: float


def device_passes(times: BlockTimes, layout: FoldedLayout, *, host: float) -> DevicePasses:
    """Return the seconds that a block's passes occupy the device."""
    recomputed = _recomputed(times, layout)
    compute, exchange = times.compute, times.passes("exchange")
    rest = times.communication.forward - exchange.forward
    other_back = times.communication.grad_input - exchange.grad_input
    forward, backward = compute.forward + rest, compute.backward + other_back + recomputed
    return DevicePasses(times, forward, backward, recomputed, forward + backward - host)


def block_seconds(
    layout: FoldedLayout,
    *,
    device: DevicePasses,
    saved: tuple[float, float],
    overlap_hidden: float,
) -> BlockSeconds:
    """Return a block's passes, with recomputation and with hidden exchanges.

    A block takes the device's time or the host's launch time, whichever is longer. Exchanges
    follow, because the host waits for the numbers of rows in each of them.

    Args:
        device: the block's passes on the device.
        saved: seconds that chunks save in the forward and the backward pass.
    """
    times, forward, backward, again, slack = device
    exchange, repeats = times.passes("exchange"), repeats_exchange(layout)
    exchanges = exchange.grad_input + exchange.forward * repeats
    waiting = max(0.0, -slack)
    if layout.overlap == "batch":
        computed = forward + backward + waiting
        share = overlap_hidden * min(computed, exchange.forward + exchanges) / 2
        saved = share, share
    repeated = saved[0] if repeats else 0.0
    return BlockSeconds(
        forward=forward + exchange.forward - saved[0] + FORWARD_OF_BOTH * waiting,
        backward=backward + exchanges - saved[1] + (1 - FORWARD_OF_BOTH) * waiting,
        weight=times.compute.grad_weight + FORWARD_OF_BOTH * waiting,
        times=times,
        recomputed=again + exchanges - exchange.grad_input - repeated if again else 0.0,
        launches=waiting,
        hidden=sum(saved) - repeated,
        bound_by_host=forward + backward + waiting if waiting > _IDLE_SECONDS else 0.0,
    )


def repeats_exchange(layout: FoldedLayout) -> bool:
    """Return whether the backward pass repeats the dispatch and combine of the forward pass."""
    return "full" in layout.recompute or "moe" in layout.recompute


def _recomputed(times: BlockTimes, layout: FoldedLayout) -> float:
    """Return the seconds of computation that the backward pass repeats, without exchanges."""
    if not layout.recompute:
        return 0.0
    if "full" in layout.recompute:
        rest = times.communication.forward - times.passes("exchange").forward
        return times.compute.forward + rest
    if "selective" in layout.recompute:
        return sum(_AGAIN.get(name, 0.0) * passes.forward for name, passes in times.modules.items())
    again = {*layout.recompute, *(_OF_EXPERTS if "moe" in layout.recompute else ())}
    names = (name for name in _RECOMPUTABLE if name in again and name in times.modules)
    return sum(times.modules[name].forward for name in names)


class Room(NamedTuple):
    """Seconds in one micro-batch's passes that gradients and parameters can overlap."""

    forward: float
    backward: float


NO_ROOM, WITHOUT_END = Room(0.0, 0.0), Room(math.inf, math.inf)
