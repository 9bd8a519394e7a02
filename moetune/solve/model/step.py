"""Time of a training step under a layout: blocks, pipeline, gradients and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import fsum

from moetune.domain.once import Tables, once
from moetune.domain.pipeline import SPLITTING, StageLetters
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.model.activations import ELEMENT, block_bytes
from moetune.solve.model.block import GEMM_FORMS
from moetune.solve.model.blocks import BlockTable
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import FORWARD_OF_BOTH, BlockSeconds, Passes, Room, computing
from moetune.solve.model.pipeline import StagePipeline, least_seconds, play
from moetune.solve.model.stages import (
    DecoderStages,
    RankBlocks,
    StageBlocks,
    balanced_stages,
    block_counts,
)
from moetune.solve.model.update import UpdatePrices

_ROUNDING = 1e-12
_SLOWER = 1 + 1e-6
"""Of collectives, to see how much of a step follows them."""
_SEEN = 1e-6
"""Of a step, what of it follows collectives at least: less is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """A step's time.

    Args:
        parts: seconds on the slowest pipeline rank by name, all micro-batches; they add up to
            `seconds`.
        beside: seconds of exchanges on that rank that shared experts hide in one chunk.
        bound_by_host: seconds of blocks on that rank that take as long as their launches.
        bound_by_replicas: seconds of passes that collectives of gradients and parameters outlast,
            which run beside them; what these take longer is the part "gradients".
    """

    seconds: float
    parts: Mapping[str, float]
    beside: float = 0.0
    bound_by_host: float = 0.0
    bound_by_replicas: float = 0.0


def _of_micro_batch(layout: FoldedLayout) -> tuple[object, ...]:
    """Return what the seconds of a micro-batch depend on."""
    return (
        layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.dispatcher,
        layout.overlap, layout.degree, layout.recompute,
        layout.cuda_graphs,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices(Tables):
    """Prices of a job's layouts on a machine.

    Args:
        target: the runtime that the prices are for.
    """

    job: TrainingJob
    device: DevicePrices
    stages: DecoderStages
    target: Target
    blocks: BlockTable = field(init=False, repr=False)
    update: UpdatePrices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.device.slowdown != self.target.kernels.slowdown:
            slower = replace(self.device, slowdown=self.target.kernels.slowdown)
            object.__setattr__(self, "device", slower)
        blocks = BlockTable(
            job=self.job, device=self.device, stages=self.stages, target=self.target
        )
        update = UpdatePrices(
            job=self.job, device=self.device, stages=self.stages, target=self.target
        )
        object.__setattr__(self, "blocks", blocks)
        object.__setattr__(self, "update", update)

    def step(self, layout: FoldedLayout) -> StepSeconds:
        """Return the time of a step."""
        pipeline = self.pipeline(layout)
        seconds = self._played(pipeline)
        busiest, slowest, rest = self._rest(layout, pipeline)
        parts = self._parts(slowest, layout, pipeline.num_micro_batches)
        waits = seconds - pipeline.num_micro_batches * busiest
        # Without a pipeline both are one sum, but of floats in another order.
        parts["bubble and sends"] = waits if waits > _ROUNDING * seconds else 0.0
        blocks = self.blocks.seconds(layout)
        counts = block_counts(slowest, len(blocks))
        kinds = [*zip(counts, blocks, strict=True)]
        return StepSeconds(
            seconds=seconds + sum(rest.values()), parts=parts | rest,
            beside=pipeline.num_micro_batches * sum(count * one.beside for count, one in kinds),
            bound_by_host=pipeline.num_micro_batches
            * sum(count * one.bound_by_host for count, one in kinds),
            bound_by_replicas=self._bound_by_replicas(layout, pipeline, rest["gradients"]),
        )  # fmt: skip

    def mean_parts(self, layout: FoldedLayout) -> dict[str, float]:
        """Return a step's seconds by part on the mean of its pipeline ranks; they add up to it.

        Steps are compared by it: the slowest ranks of two layouts have other modules.
        """
        pipeline = self.pipeline(layout)
        _, _, rest = self._rest(layout, pipeline)
        parts: dict[str, float] = {}
        for blocks in self.stages.ranks(layout):
            share = len(blocks.ranks) / layout.pp
            for name, seconds in self._parts(blocks, layout, pipeline.num_micro_batches).items():
                parts[name] = parts.get(name, 0.0) + share * seconds
        waits = self._played(pipeline) - fsum(pipeline.busy) / layout.pp
        parts["bubble and sends"] = max(0.0, waits)
        return parts | rest

    def least(self, layout: FoldedLayout) -> float:
        """Return seconds that the step takes at least, without playing its pipeline."""
        passes = self.least_of_passes(layout)
        return passes + self.update.optimizer_seconds(layout, layout.offload_optimizer)

    def least_of_passes(self, layout: FoldedLayout) -> float:
        """Return seconds of the pipeline and the gradients at least, without the optimizer."""
        pipeline = self.pipeline(layout)
        return least_seconds(pipeline) + self.gradients(layout, pipeline)

    def least_of_pipeline(self, layout: FoldedLayout) -> float:
        """Return seconds that its pipeline takes at least, without gradients and optimizer."""
        return least_seconds(self.pipeline(layout))

    def gradients(self, layout: FoldedLayout, pipeline: StagePipeline) -> float:
        """Return the exposed time of gradients and parameters."""
        num = pipeline.num_micro_batches
        return self.update.gradients(layout, self._room(layout, pipeline), num_micro_batches=num)

    def _bound_by_replicas(
        self, layout: FoldedLayout, pipeline: StagePipeline, exposed: float
    ) -> float:
        """Return by how much more than its exposed part a step follows collectives of replicas.

            dT/dc - T at c = 1, T(c·t, R) = c·T(t, R / c)

        T is exposed of collectives of t seconds in the room R. Where t is above R the step follows
        all of t, so that the difference is R; below it follows none.
        """
        room = self._room(layout, pipeline).divided(_SLOWER)
        num = pipeline.num_micro_batches
        slower = _SLOWER * self.update.gradients(layout, room, num_micro_batches=num)
        more = (slower - exposed) / (_SLOWER - 1) - exposed
        return more if more > _SEEN * max(pipeline.busy) else 0.0

    def _room(self, layout: FoldedLayout, pipeline: StagePipeline) -> Room:
        """Return what collectives of gradients and parameters can run beside."""
        if self.update.shares_link(layout):
            busiest = pipeline.busy.index(max(pipeline.busy))
            rank = next(one for one in self.stages.ranks(layout) if busiest in one.ranks)
            return computing(rank, self.blocks.seconds(layout), self._ends(layout), layout)
        return Room(*pipeline.busiest_passes)

    def floor(self, layout: FoldedLayout) -> float:
        """Return seconds that the step takes at least, whatever the stages have.

            T ≥ S·m/p, and under 1F1B with one stage a rank T ≥ S / (1 − (1 − 1/m)^p)

        S are the seconds of one of m micro-batches on all p ranks. The second is what stages take
        that all bind at once: rank r has m·t_r + Σ_{s < r} t_s.
        """
        return self.micro_batch_seconds(layout) * self.rounds_at_least(layout)

    def rounds_at_least(self, layout: FoldedLayout) -> float:
        """Return the least time of a pipeline over that of one micro-batch in the whole model."""
        if layout.order != "1f1b":
            return self.rounds(layout)
        return 1 / (1 - (1 - 1 / self.job.micro_batches(layout)) ** layout.pp)

    def rounds(self, layout: FoldedLayout) -> float:
        """Return the micro-batches for each rank of the pipeline, which some rank has at least."""
        return self.job.micro_batches(layout) / layout.pp

    @once(_of_micro_batch)
    def micro_batch_seconds(self, layout: FoldedLayout) -> float:
        """Return the seconds of one micro-batch in all of the model, whatever the pipeline."""
        blocks, (embedding, head) = self.blocks.seconds(layout), self._ends(layout)
        whole = self.stages.whole
        seconds = embedding + head * (1 + len(self.job.decoder.predictions))
        for count, one in zip(block_counts(whole, len(blocks)), blocks, strict=True):
            seconds += count * one.both
        return seconds

    def micro_batch_at_least(self, layout: FoldedLayout) -> float:
        """Return what `micro_batch_seconds` of a layout with chunks is at least.

        No chunks are priced for it.
        """
        plain = layout.changed(overlap="none", degree=None)
        return self.micro_batch_seconds(plain) - self.blocks.most_saved(layout)

    def pipeline(self, layout: FoldedLayout) -> StagePipeline:
        """Return the layout's pipeline."""
        blocks, ends = self.blocks.seconds(layout), self._ends(layout)
        cut = self.stages.cut(layout)
        distinct = [self._stage(one, blocks, ends) for one in cut.distinct]
        stages = [distinct[which] for which in cut.which]
        first = stages[0]
        if layout.offload_activations:
            out, back = self._waits_for_copies(layout, first)
            stages[0] = first + Passes(forward=out, grad_input=back)
        if layout.order in SPLITTING:  # torch splits no backward pass that has no input
            stages[0] = Passes(forward=first.forward, grad_input=first.backward)
        return StagePipeline(
            schedule=layout.order, pp=layout.pp, stages=tuple(stages),
            num_micro_batches=self.job.micro_batches(layout),
            send_seconds=self._send(layout), hides_sends=layout.order != "1f1b",
        )  # fmt: skip

    def _waits_for_copies(self, layout: FoldedLayout, stage: Passes) -> tuple[float, float]:
        """Return what copies of activations take longer than the pass that they run beside."""
        size = layout.offloaded_share(self.job.decoder) * self._activation_bytes(layout)
        out, back = self.device.copied("d2h", size), self.device.copied("h2d", size)
        return max(0.0, out - stage.forward), max(0.0, back - stage.backward)

    @once(lambda layout: (layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch))
    def _activation_bytes(self, layout: FoldedLayout) -> float:
        """Return the bytes of all blocks' activations for one micro-batch."""
        decoder = self.job.decoder
        every = zip(self.stages.whole.counts, decoder.kinds, strict=True)
        return fsum(count * block_bytes(kind, self.job, layout) for count, kind in every)

    def balanced(self, layout: FoldedLayout) -> FoldedLayout:
        """Return the layout with stages whose ranks take as equally long as blocks allow."""
        return layout.changed(stages=self._balanced_stages(layout))

    @once(lambda layout: (_of_micro_batch(layout), layout.pp, layout.vpp, layout.order))
    def _balanced_stages(self, layout: FoldedLayout) -> StageLetters | None:
        """Return the balanced stages; None where the equal ones are they."""
        blocks, (embedding, head) = self.blocks.seconds(layout), self._ends(layout)
        decoder = self.job.decoder
        whole = self.stages.whole
        every = sum(count * one.both for count, one in zip(whole.counts, blocks, strict=False))
        predicted = sum(one.both + head for one in blocks[len(decoder.kinds) :])
        stages = balanced_stages(
            decoder, layout,
            block_seconds=every / decoder.num_layers,
            embedding_seconds=embedding, head_seconds=head + predicted,
        )  # fmt: skip
        return None if stages == layout.even_stages(decoder) else stages

    def _rest(
        self, layout: FoldedLayout, pipeline: StagePipeline
    ) -> tuple[float, RankBlocks, dict[str, float]]:
        """Return the busiest rank's seconds of a micro-batch, that rank, and the other parts."""
        busy = [seconds / pipeline.num_micro_batches for seconds in pipeline.busy]
        ranks = [(busy[one.ranks[0]], one) for one in self.stages.ranks(layout)]
        busiest, slowest = max(ranks, key=lambda pair: pair[0])
        rest = {
            "gradients": self.gradients(layout, pipeline),
            "optimizer": self.update.optimizer_seconds(layout, layout.offload_optimizer),
        }
        return busiest, slowest, rest

    def _stage(
        self, stage: StageBlocks, blocks: tuple[BlockSeconds, ...], ends: tuple[float, float]
    ) -> Passes:
        heads = stage.has_head + stage.has_predictions * len(self.job.decoder.predictions)
        head = FORWARD_OF_BOTH * heads * ends[1]
        embedding = stage.has_embedding * ends[0]
        forward, weight = head + FORWARD_OF_BOTH * embedding, head
        grad_input = head + (1 - FORWARD_OF_BOTH) * embedding
        for count, one in zip(block_counts(stage, len(blocks)), blocks, strict=True):
            if count:
                forward += count * one.forward
                weight += count * one.weight
                grad_input += count * (one.backward - one.weight)
        return Passes(forward=forward, grad_input=grad_input, grad_weight=weight)

    @once(lambda pipeline: pipeline)
    def _played(self, pipeline: StagePipeline) -> float:
        """Return the seconds of a pipeline, which layouts share that differ in their states."""
        return play(pipeline)

    def _parts(self, rank: RankBlocks, layout: FoldedLayout, batches: int) -> dict[str, float]:
        blocks, ends = self.blocks.seconds(layout), self._ends(layout)
        parts: dict[str, float] = {}
        for count, one in zip(block_counts(rank, len(blocks)), blocks, strict=True):
            for name, seconds in one.parts.items():
                parts[name] = parts.get(name, 0.0) + batches * count * seconds
        parts["embedding"] = batches * rank.has_embedding * ends[0]
        heads = rank.has_head + rank.has_predictions * len(self.job.decoder.predictions)
        parts["head"] = batches * heads * ends[1]
        if layout.offload_activations:
            plain = self.pipeline(replace(layout, offload_activations=0.0)).stages[0]
            parts["offload"] = batches * sum(self._waits_for_copies(layout, plain))
        return parts

    @once(lambda layout: (layout.tp, layout.cp, layout.micro_batch))
    def _ends(self, layout: FoldedLayout) -> tuple[float, float]:
        """Return the embedding's and a head's seconds for one micro-batch, both passes."""
        decoder, device = self.job.decoder, self.device
        tokens = layout.micro_batch * self.job.length / layout.cp
        vocab = -(-decoder.vocab_size // layout.tp)
        embedding = 2 * device.moved(2 * ELEMENT * tokens * decoder.d_model, kernels=2)
        gemms = sum(
            device.gemm(product, rows=tokens, d_in=decoder.d_model, d_out=vocab)
            for product in GEMM_FORMS
        )
        # Logits are read and written in float32 by the loss, forward and backward.
        loss = device.moved(4 * 2 * ELEMENT * tokens * vocab, kernels=6)
        return embedding, gemms + loss

    def _send(self, layout: FoldedLayout) -> float:
        if layout.pp == 1:
            return 0.0
        tokens = layout.micro_batch * self.job.length / (layout.cp * layout.tp)
        span = self.device.span(2, layout.stage_ranks)
        return self.device.collective("send", span, ELEMENT * tokens * self.job.decoder.d_model)
