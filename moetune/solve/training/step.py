"""Time of a training step under a layout: blocks, pipeline, gradients and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass

from moetune.domain.architecture import Block
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.training.block import ELEMENT, BlockPrices, BlockTimes
from moetune.solve.training.machine import Device
from moetune.solve.training.stages import StageBlocks, cut, of_rank, pipeline_seconds

_BATCH_OVERLAP = 1.09
"""Span over the longer of computation and communication, where one micro-batch's exchanges run
beside another one's computation: DeepSeek's published trace (profile-data, train.json, H800)."""

_HOST_SECONDS = {"mixer": 2.0e-3, "dense": 0.8e-3, "routed": 4.5e-3, "tensor_parallel": 3.0e-3}
"""Of launching both passes of a part of a block without CUDA graphs, in Megatron-Core.

Modelled: the visible public runs on H100 whose device time is far below their step's take 9.6 to
11 ms for an attention and an MoE part with tp above 1, and at most 6.8 ms with tp 1."""
_FORWARD_OF_BOTH = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """A step's time.

    Args:
        parts: seconds on the slowest pipeline rank by name, all micro-batches; they add up to
            `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of a block for one micro-batch.

    Args:
        parts: of both passes, by module.
    """

    forward: float
    backward: float
    parts: Mapping[str, float]

    @property
    def both(self) -> float:
        """Both passes."""
        return self.forward + self.backward


def host_seconds(block: Block, layout: FoldedLayout) -> float:
    """Return the host's time to launch both passes of a block."""
    kinds = [
        "routed" if isinstance(part, RoutedExperts)
        else "dense" if isinstance(part, DenseFfn) else "mixer"
        for part in block.parts
    ]  # fmt: skip
    total = sum(_HOST_SECONDS[kind] for kind in kinds)
    total += _HOST_SECONDS["tensor_parallel"] * (layout.tp > 1)
    return total * (1 + _FORWARD_OF_BOTH * ("full" in layout.recompute))


def block_seconds(block: Block, times: BlockTimes, layout: FoldedLayout) -> BlockSeconds:
    """Return a block's passes, with what is recomputed, and exchanges hidden where they are.

    A pass takes as long as the device or the host that launches it, whichever is longer.
    """
    again = _recomputed(times, layout)
    compute, exchange = times.compute, times.passes("exchange")
    other = times.communication.forward - exchange.forward
    other_back = times.communication.grad_input - exchange.grad_input
    exchanges = exchange.forward * (2 if _repeats_exchange(layout) else 1)
    forward = compute.forward + other
    backward = compute.backward + other_back + again
    hidden = 0.0
    total = forward + backward + exchange.forward + exchanges
    if layout.overlap == "batch":
        longer = max(forward + backward, 2 * exchange.forward)
        hidden = max(0.0, total - _BATCH_OVERLAP * longer)
    share = hidden / 2
    parts = {name: one.forward + one.backward for name, one in times.modules.items()}
    if again:
        parts["recompute"] = again + exchanges - exchange.grad_input
    if hidden:
        parts["exchange"] -= hidden
    both = total - hidden
    waiting = max(0.0, host_seconds(block, layout) - both)
    if waiting:
        parts["launches"] = waiting
    return BlockSeconds(
        forward=forward + exchange.forward - share + _FORWARD_OF_BOTH * waiting,
        backward=backward + exchanges - share + (1 - _FORWARD_OF_BOTH) * waiting,
        parts=parts,
    )


def _repeats_exchange(layout: FoldedLayout) -> bool:
    return "full" in layout.recompute or "moe" in layout.recompute


def _recomputed(times: BlockTimes, layout: FoldedLayout) -> float:
    """Return the seconds of computation that the backward pass repeats, without exchanges."""
    if "full" in layout.recompute:
        other = times.communication.forward - times.passes("exchange").forward
        return times.compute.forward + other
    total = 0.0
    if "moe" in layout.recompute:
        names = ("experts", "moe_act", "router", "permute", "shared_experts")
        total += sum(times.passes(name).forward for name in names)
    elif "moe_act" in layout.recompute:
        total += times.passes("moe_act").forward
    if "norm" in layout.recompute:
        total += times.passes("norm").forward
    if "core_attn" in layout.recompute:
        total += times.passes("core_attn").forward
    if "mlp" in layout.recompute:
        total += times.passes("mlp").forward
    if "shared_experts" in layout.recompute and "moe" not in layout.recompute:
        total += times.passes("shared_experts").forward
    if "mla_up_proj" in layout.recompute:
        total += times.passes("attention").forward / 3
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """Prices of a job's layouts on a machine. Not safe for several threads."""

    job: TrainingJob
    device: Device
    skew: float = 1.0
    hides_gradients: bool = True

    def blocks(self, layout: FoldedLayout) -> tuple[BlockSeconds, ...]:
        """Return the seconds of each kind of block."""
        prices = BlockPrices(job=self.job, layout=layout, device=self.device, skew=self.skew)
        return tuple(
            block_seconds(kind, prices.times(kind), layout) for kind in self.job.decoder.kinds
        )

    def step(self, layout: FoldedLayout) -> StepSeconds:
        """Return the time of a step."""
        blocks = self.blocks(layout)
        stages = cut(self.job.decoder, layout.num_stages)
        batches = self.job.global_batch // (layout.micro_batch * layout.dp)
        ends = self._ends(layout)
        ranks = [
            sum(self._stage(stage, blocks, ends) for stage in of_rank(stages, rank, layout.pp))
            for rank in range(layout.pp)
        ]
        slowest = max(range(layout.pp), key=ranks.__getitem__)
        pipeline = pipeline_seconds(
            ranks, vpp=layout.vpp, num_micro_batches=batches, send_seconds=self._send(layout)
        )
        gradients = self._gradients(layout, ranks[slowest])
        optimizer = self._optimizer(layout)
        parts = self._parts(of_rank(stages, slowest, layout.pp), blocks, ends, batches)
        parts["bubble and sends"] = pipeline - batches * ranks[slowest]
        parts["gradients"], parts["optimizer"] = gradients, optimizer
        return StepSeconds(seconds=pipeline + gradients + optimizer, parts=parts)

    def _stage(
        self, stage: StageBlocks, blocks: tuple[BlockSeconds, ...], ends: tuple[float, float]
    ) -> float:
        own = sum(count * one.both for count, one in zip(stage.counts, blocks, strict=True))
        return own + stage.has_embedding * ends[0] + stage.has_head * ends[1]

    def _parts(
        self,
        stages: tuple[StageBlocks, ...],
        blocks: tuple[BlockSeconds, ...],
        ends: tuple[float, float],
        batches: int,
    ) -> dict[str, float]:
        parts: dict[str, float] = {}
        for stage in stages:
            for count, one in zip(stage.counts, blocks, strict=True):
                for name, seconds in one.parts.items():
                    parts[name] = parts.get(name, 0.0) + batches * count * seconds
            parts["embedding"] = parts.get("embedding", 0.0) + batches * stage.has_embedding * ends[0]
            parts["head"] = parts.get("head", 0.0) + batches * stage.has_head * ends[1]
        return parts

    def _ends(self, layout: FoldedLayout) -> tuple[float, float]:
        """Return the embedding's and the head's seconds for one micro-batch, both passes."""
        decoder, device = self.job.decoder, self.device
        tokens = layout.micro_batch * self.job.length / layout.cp
        vocab = -(-decoder.vocab_size // layout.tp)
        embedding = 2 * device.moved(2 * ELEMENT * tokens * decoder.d_model, kernels=2)
        gemms = [
            device.gemm(
                product, rows=tokens, d_in=decoder.d_model, d_out=vocab, dtype="bfloat16"
            )
            for product in ("forward", "grad_input", "grad_weight")
        ]
        # Logits are read and written in float32 by the loss, forward and backward.
        loss = device.moved(4 * 2 * ELEMENT * tokens * vocab, kernels=6)
        heads = 1 + len(decoder.predictions)
        predictions = 0.0
        for one in decoder.predictions:
            prices = BlockPrices(job=self.job, layout=layout, device=device, skew=self.skew)
            predictions += sum(
                block_seconds(block, prices.times(block), layout).both for block in one.blocks
            )
        return embedding, heads * (sum(gemms) + loss) + predictions

    def _send(self, layout: FoldedLayout) -> float:
        if layout.pp == 1:
            return 0.0
        tokens = layout.micro_batch * self.job.length / (layout.cp * layout.tp)
        stride = self.job.world_size // layout.pp
        span = self.device.span(2, stride)
        return self.device.collective("send", span, ELEMENT * tokens * self.job.decoder.d_model)

    def _gradients(self, layout: FoldedLayout, micro_batch_seconds: float) -> float:
        """Return the exposed time of the reduction of gradients and the gathering of parameters.

        Both are hidden behind the last micro-batch's backward pass and the first one's forward
        pass as far as these are long.
        """
        dense, experts = parameters_of_rank(self.job, layout)
        data = self.device.span(layout.dp * layout.cp, layout.tp)
        replicas = self.device.span(layout.edp, layout.ep * layout.etp)
        reduced = gathered = 0.0
        for count, span in ((dense, data), (experts, replicas)):
            reduced += self.device.collective("reduce_scatter", span, ELEMENT * count)
            gathered += self.device.collective("all_gather", span, ELEMENT * count / span.size)
        if not self.hides_gradients:
            return reduced + gathered
        backward, forward = 2 * micro_batch_seconds / 3, micro_batch_seconds / 3
        return max(0.0, reduced - backward) + max(0.0, gathered - forward)

    def _optimizer(self, layout: FoldedLayout) -> float:
        dense, experts = parameters_of_rank(self.job, layout)
        shards = (layout.dp * layout.cp, layout.edp) if layout.zero else (1, 1)
        return self.device.adam(dense / shards[0] + experts / shards[1])


def parameters_of_rank(job: TrainingJob, layout: FoldedLayout, rank: int = 0) -> tuple[float, float]:
    """Return a pipeline rank's parameters on one device: all but the experts, and the experts."""
    decoder = job.decoder
    stages = of_rank(cut(decoder, layout.num_stages), rank, layout.pp)
    dense = experts = 0.0
    for stage in stages:
        for count, kind in zip(stage.counts, decoder.kinds, strict=True):
            own, shared = block_parameters(kind, layout)
            dense, experts = dense + count * own, experts + count * shared
        table = decoder.vocab_size * decoder.d_model / layout.tp
        dense += table * (stage.has_embedding + stage.has_head)
        if stage.has_head:
            for one in decoder.predictions:
                dense += one.projection / layout.tp
                for block in one.blocks:
                    own, shared = block_parameters(block, layout)
                    dense, experts = dense + own, experts + shared
    return dense, experts


def block_parameters(block: Block, layout: FoldedLayout) -> tuple[float, float]:
    """Return a block's parameters on one device: all but the experts, and the experts."""
    amounts = block.parameters
    whole = amounts.router + amounts.norms
    cut_parts = amounts.attention + amounts.dense + amounts.shared
    routed = next((one for one in block.parts if isinstance(one, RoutedExperts)), None)
    experts = 0.0
    if routed is not None:
        experts = routed.num_experts * routed.expert_parameters / (layout.ep * layout.etp)
        whole += amounts.routed - routed.num_experts * routed.expert_parameters
    return whole + cut_parts / layout.tp, experts


