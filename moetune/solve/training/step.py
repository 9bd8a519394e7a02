"""Time of a training step under a layout: blocks, pipeline, gradients and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from moetune.domain.architecture import Block, Decoder
from moetune.domain.attention import LatentAttention
from moetune.domain.experts import RoutedExperts
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.training.activations import ELEMENT
from moetune.solve.training.block import GEMM_FORMS, BlockPrices, BlockTimes
from moetune.solve.training.machine import DevicePrices
from moetune.solve.training.passes import FORWARD_OF_BOTH, BlockSeconds, block_seconds
from moetune.solve.training.stages import DecoderStages, RankBlocks, pipeline_seconds

_SHARDS_GRADIENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """A step's time.

    Args:
        parts: seconds on the slowest pipeline rank by name, all micro-batches; they add up to
            `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]


_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices:
    """Prices of a job's layouts on a machine, each part computed once.

    Not safe for several threads.

    Args:
        target: the runtime that the prices are for.
    """

    job: TrainingJob
    device: DevicePrices
    stages: DecoderStages
    target: Target
    _blocks: dict[_Key, tuple[BlockSeconds, ...]] = field(
        default_factory=dict, init=False, repr=False
    )
    _times: dict[_Key, tuple[BlockTimes, ...]] = field(default_factory=dict, init=False, repr=False)

    def blocks(self, layout: FoldedLayout) -> tuple[BlockSeconds, ...]:
        """Return the seconds of each kind of block, and then of each block of predictions."""
        shape = (layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.dispatcher)
        key = (*shape, layout.recompute, layout.overlap)
        found = self._blocks.get(key)
        if found is None:
            times = self._times.get(shape)
            every = self._every_kind
            if times is None:
                prices = BlockPrices(job=self.job, layout=layout, device=self.device)
                times = self._times[shape] = tuple(prices.times(kind) for kind in every)
            found = self._blocks[key] = tuple(
                block_seconds(kind, one, layout, self.target)
                for kind, one in zip(every, times, strict=True)
            )
        return found

    def step(self, layout: FoldedLayout) -> StepSeconds:
        """Return the time of a step."""
        blocks, ends = self.blocks(layout), self._ends(layout)
        batches = self.job.global_batch // (layout.micro_batch * layout.dp)
        ranks = [
            (self._rank(one, blocks, ends), one) for one in self.stages.of(layout.pp, layout.vpp)
        ]
        busiest, slowest = max(ranks, key=lambda pair: pair[0])
        pipeline = pipeline_seconds(
            [(seconds, len(one.ranks)) for seconds, one in ranks],
            vpp=layout.vpp, num_micro_batches=batches, send_seconds=self._send(layout),
        )  # fmt: skip
        gradients = self._gradients(layout, busiest, batches)
        optimizer = self._optimizer(layout)
        parts = self._parts(slowest, blocks, ends, batches)
        parts["bubble and sends"] = pipeline - batches * busiest
        parts["gradients"], parts["optimizer"] = gradients, optimizer
        return StepSeconds(seconds=pipeline + gradients + optimizer, parts=parts)

    @property
    def _every_kind(self) -> tuple[Block, ...]:
        decoder = self.job.decoder
        return (*decoder.kinds, *(block for one in decoder.predictions for block in one.blocks))

    def _rank(
        self, rank: RankBlocks, blocks: tuple[BlockSeconds, ...], ends: tuple[float, float]
    ) -> float:
        own = sum(count * one.both for count, one in zip(rank.counts, blocks, strict=False))
        predicted = sum(one.both for one in blocks[len(rank.counts) :])
        return own + rank.has_embedding * ends[0] + rank.has_head * (ends[1] + predicted)

    def _parts(
        self,
        rank: RankBlocks,
        blocks: tuple[BlockSeconds, ...],
        ends: tuple[float, float],
        batches: int,
    ) -> dict[str, float]:
        parts: dict[str, float] = {}
        predictions = (int(rank.has_head),) * (len(blocks) - len(rank.counts))
        for count, one in zip((*rank.counts, *predictions), blocks, strict=True):
            for name, seconds in one.parts.items():
                parts[name] = parts.get(name, 0.0) + batches * count * seconds
        parts["embedding"] = batches * rank.has_embedding * ends[0]
        parts["head"] = batches * rank.has_head * ends[1]
        return parts

    def _ends(self, layout: FoldedLayout) -> tuple[float, float]:
        """Return the embedding's and the head's seconds for one micro-batch, both passes."""
        decoder, device = self.job.decoder, self.device
        tokens = layout.micro_batch * self.job.length / layout.cp
        vocab = -(-decoder.vocab_size // layout.tp)
        embedding = 2 * device.moved(2 * ELEMENT * tokens * decoder.d_model, kernels=2)
        gemms = sum(
            device.gemm(product, rows=tokens, d_in=decoder.d_model, d_out=vocab, dtype="bfloat16")
            for product in GEMM_FORMS
        )
        # Logits are read and written in float32 by the loss, forward and backward.
        loss = device.moved(4 * 2 * ELEMENT * tokens * vocab, kernels=6)
        return embedding, (1 + len(decoder.predictions)) * (gemms + loss)

    def _send(self, layout: FoldedLayout) -> float:
        if layout.pp == 1:
            return 0.0
        tokens = layout.micro_batch * self.job.length / (layout.cp * layout.tp)
        span = self.device.span(2, layout.stage_ranks)
        return self.device.collective("send", span, ELEMENT * tokens * self.job.decoder.d_model)

    def _gradients(
        self, layout: FoldedLayout, micro_batch_seconds: float, num_micro_batches: int
    ) -> float:
        """Return the exposed time of the reduction of gradients and the gathering of parameters.

        They run beside the last micro-batch's backward pass and the first one's forward pass as
        far as these are long. Sharded gradients are reduced after each micro-batch, and sharded
        parameters gathered before each pass.
        """
        dense, experts = self._most_parameters(layout)
        data = self.device.span(layout.dp * layout.cp, layout.tp)
        replicas = self.device.span(layout.edp, layout.ep * layout.etp)
        reduced = gathered = 0.0
        for count, span in ((dense, data), (experts, replicas)):
            reduced += self.device.collective("reduce_scatter", span, ELEMENT * count)
            gathered += self.device.collective("all_gather", span, ELEMENT * count / span.size)
        forward = FORWARD_OF_BOTH * micro_batch_seconds * self.target.hides_gradients
        first = max(0.0, reduced - 2 * forward) + max(0.0, gathered - forward)
        again = 0.0
        if layout.zero >= _SHARDS_GRADIENTS:
            again += max(0.0, reduced - 2 * forward)
        if layout.zero > _SHARDS_GRADIENTS:
            again += 2 * max(0.0, gathered - forward)
        return first + (num_micro_batches - 1) * again

    def _optimizer(self, layout: FoldedLayout) -> float:
        dense, experts = self._most_parameters(layout)
        shards = (layout.dp * layout.cp, layout.edp) if layout.zero else (1, 1)
        return self.device.adam(dense / shards[0] + experts / shards[1])

    def _most_parameters(self, layout: FoldedLayout) -> tuple[float, float]:
        ranks = self.stages.of(layout.pp, layout.vpp)
        return max((rank_parameters(self.job.decoder, layout, one) for one in ranks), key=sum)


def rank_parameters(
    decoder: Decoder, layout: FoldedLayout, rank: RankBlocks
) -> tuple[float, float]:
    """Return a pipeline rank's parameters on one device: all but the experts, and the experts."""
    table = decoder.vocab_size * decoder.d_model / layout.tp
    dense, experts = table * (rank.has_embedding + rank.has_head), 0.0
    for count, kind in zip(rank.counts, decoder.kinds, strict=True):
        own, shared = block_parameters(kind, layout)
        dense, experts = dense + count * own, experts + count * shared
    for one in decoder.predictions if rank.has_head else ():
        dense += one.projection / layout.tp
        for block in one.blocks:
            own, shared = block_parameters(block, layout)
            dense, experts = dense + own, experts + shared
    return dense, experts


@cache
def _amounts(block: Block) -> tuple[float, float, float]:
    """Return a block's parameters: on every rank, cut over tensor ranks, and of the experts."""
    amounts = block.parameters
    routed = next((one for one in block.parts if isinstance(one, RoutedExperts)), None)
    experts = 0 if routed is None else routed.num_experts * routed.expert_parameters
    latent = sum(one.latent_parameters for one in block.parts if isinstance(one, LatentAttention))
    whole = amounts.router + amounts.norms + amounts.routed - experts + latent
    return whole, amounts.attention - latent + amounts.dense + amounts.shared, experts


def block_parameters(block: Block, layout: FoldedLayout) -> tuple[float, float]:
    """Return a block's parameters on one device: all but the experts, and the experts."""
    whole, shared, experts = _amounts(block)
    return whole + shared / layout.tp, experts / (layout.ep * layout.etp)
