"""Time of a training step under a layout: blocks, pipeline, gradients and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import fsum

from moetune.domain.once import once, once_for
from moetune.domain.pipeline import SPLITTING, StageLetters
from moetune.domain.training import FoldedLayout
from moetune.solve.model.activations import ELEMENT, block_modules
from moetune.solve.model.blocks import BlockTable
from moetune.solve.model.passes import FORWARD_OF_BOTH, BlockSeconds, Passes, Room
from moetune.solve.model.pipeline import (
    RankBlocks,
    StageBlocks,
    StagePipeline,
    balanced_stages,
    counted,
    least_seconds,
    play,
)
from moetune.solve.model.update import UpdatePrices

_ROUNDING = 1e-12
_SLOWER = 1 + 1e-6
"""Factor on collectives' times that reveals the share of a step that depends on them."""
_SEEN = 1e-6
"""Least share of a step that counts as dependent on collectives; less is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """A step's time, in seconds as of `TrainingStep`.

    Args:
        parts: seconds on the slowest pipeline rank by name, over all micro-batches; they add up to
            `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]
    bound_by_host: float
    bound_by_replicas: float


_OF_MICRO_BATCH = (
    "tp", "cp", "ep", "etp", "micro_batch", "dispatcher", "overlap", "degree", "recompute",
    "cuda_graphs",
)  # fmt: skip
"""Fields of a layout that the seconds of a micro-batch depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrices(UpdatePrices):
    """Prices of a job's layouts on a machine."""

    blocks: BlockTable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.device.slowdown != self.target.kernels.slowdown:
            slower = replace(self.device, slowdown=self.target.kernels.slowdown)
            object.__setattr__(self, "device", slower)
        table = BlockTable(job=self.job, device=self.device, stages=self.stages, target=self.target)
        object.__setattr__(self, "blocks", table)

    def step(self, layout: FoldedLayout) -> StepSeconds:
        """Return the time of a step."""
        pipeline = self.pipeline(layout)
        seconds, num = self._played(pipeline), pipeline.num_micro_batches
        busiest, slowest, rest = self._rest(layout, pipeline)
        parts = self._parts(slowest, layout, num)
        waits = seconds - num * busiest
        # Without a pipeline both are the same sum, except for the order of floats.
        parts["bubble and sends"] = waits if waits > _ROUNDING * seconds else 0.0
        blocks = counted(slowest, self.blocks.seconds(layout))
        return StepSeconds(
            seconds=seconds + sum(rest.values()), parts=parts | rest,
            bound_by_host=num * sum(n * block.bound_by_host for n, block in blocks),
            bound_by_replicas=self._bound_by_replicas(layout, pipeline, rest["gradients"]),
        )  # fmt: skip

    def mean_parts(self, layout: FoldedLayout) -> dict[str, float]:
        """Return a step's seconds by part on the mean of its ranks, to compare steps."""
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
        """Return a lower bound on the step's seconds, without simulating its pipeline."""
        optimizer = self.optimizer_seconds(layout, layout.offload_optimizer)
        return self.least_of_passes(layout) + optimizer + self.target.between_steps

    def least_of_passes(self, layout: FoldedLayout) -> float:
        """Return a lower bound on the seconds of pipeline and gradients, without the optimizer."""
        pipeline = self.pipeline(layout)
        return least_seconds(pipeline) + self.gradients(layout, pipeline)

    def gradients(self, layout: FoldedLayout, pipeline: StagePipeline) -> float:
        """Return the exposed time of reducing gradients and gathering parameters."""
        return self.exposed_seconds(layout, self._room(layout, pipeline))

    def _bound_by_replicas(
        self, layout: FoldedLayout, pipeline: StagePipeline, exposed: float
    ) -> float:
        """Return the dependence of a step on replicas' collectives, beyond its exposed part.

            dT/dc - T at c = 1, T(c·t, R) = c·T(t, R / c)

        T is the exposed time of collectives of t seconds in the room R. If t exceeds R, the step
        depends on all of t, so the difference is R. Otherwise it does not depend on t.
        """
        room = Room(*(seconds / _SLOWER for seconds in self._room(layout, pipeline)))
        slower = _SLOWER * self.exposed_seconds(layout, room)
        more = (slower - exposed) / (_SLOWER - 1) - exposed
        return more if more > _SEEN * max(pipeline.busy) else 0.0

    def _room(self, layout: FoldedLayout, pipeline: StagePipeline) -> Room:
        """Return the seconds that collectives of gradients and parameters can overlap."""
        if self.shares_link(layout):
            busiest = pipeline.busy.index(max(pipeline.busy))
            rank = next(rank for rank in self.stages.ranks(layout) if busiest in rank.ranks)
            return self.blocks.room(rank, layout)
        return Room(*pipeline.busiest_passes)

    def rounds_at_least(self, layout: FoldedLayout) -> float:
        """Return a lower bound on a pipeline's time T over S, one micro-batch in the whole model.

            T ≥ S·m/p, and under 1F1B with one stage a rank T ≥ S / (1 − (1 − 1/m)^p)

        There are m micro-batches and p ranks. The second bound is the time of stages that all bind
        at once: rank r takes m·t_r + Σ_{s < r} t_s.
        """
        if layout.order != "1f1b":
            return self.job.micro_batches(layout) / layout.pp
        return 1 / (1 - (1 - 1 / self.job.micro_batches(layout)) ** layout.pp)

    @once_for(*_OF_MICRO_BATCH)
    def micro_batch(self, layout: FoldedLayout) -> tuple[float, float]:
        """Return a micro-batch's seconds in the whole model, and those that wait for launches."""
        embedding, head = self.blocks.ends(layout)
        blocks = counted(self.stages.whole, self.blocks.seconds(layout))
        ends = embedding + head * (1 + len(self.job.decoder.predictions))
        seconds = sum((count * block.both for count, block in blocks), ends)
        return seconds, sum(count * block.launches for count, block in blocks)

    def pipeline(self, layout: FoldedLayout) -> StagePipeline:
        """Return the pipeline of stages and schedule for a layout."""
        blocks, ends = self.blocks.seconds(layout), self.blocks.ends(layout)
        cut = self.stages.cut(layout)
        distinct = [self._stage(stage, blocks, ends) for stage in cut.distinct]
        stages = [distinct[which] for which in cut.which]
        if layout.order in SPLITTING:  # torch does not split a backward pass without an input
            stages[0] = Passes(forward=stages[0].forward, grad_input=stages[0].backward)
        if layout.offload_activations:
            stages[0] += self._waits_for_copies(layout, stages[0])
        return StagePipeline(
            schedule=layout.order, pp=layout.pp, stages=tuple(stages),
            num_micro_batches=self.job.micro_batches(layout),
            send_seconds=self._send(layout), hides_sends=layout.order != "1f1b",
        )  # fmt: skip

    def _waits_for_copies(self, layout: FoldedLayout, stage: Passes) -> Passes:
        """Return the time by which copies of activations exceed the pass that they overlap."""
        size = layout.offloaded_share(self.job.decoder) * self._activation_bytes(layout)
        out, back = self.device.copy_seconds("d2h", size), self.device.copy_seconds("h2d", size)
        return Passes(max(0.0, out - stage.forward), max(0.0, back - stage.backward))

    @once_for("tp", "cp", "ep", "etp", "micro_batch")
    def _activation_bytes(self, layout: FoldedLayout) -> float:
        """Return the bytes of all blocks' activations for one micro-batch."""
        decoder = self.job.decoder
        kinds = zip(self.stages.whole.counts, decoder.kinds, strict=True)
        modules = ((n, block_modules(kind, self.job, layout, self.target)) for n, kind in kinds)
        return fsum(n * sum(sizes.values()) for n, sizes in modules)

    @once_for(*_OF_MICRO_BATCH, "pp", "vpp", "schedule")
    def balanced_stages(self, layout: FoldedLayout) -> StageLetters | None:
        """Return stages that balance the ranks' time; None if they equal the even stages."""
        blocks, (embedding, head) = self.blocks.seconds(layout), self.blocks.ends(layout)
        decoder, counts = self.job.decoder, self.stages.whole.counts
        total = sum(count * block.both for count, block in zip(counts, blocks, strict=False))
        predicted = sum(block.both + head for block in blocks[len(decoder.kinds) :])
        stages = balanced_stages(
            decoder, layout, block_seconds=total / decoder.num_layers,
            embedding_seconds=embedding, head_seconds=head + predicted,
        )  # fmt: skip
        return None if stages == layout.even_stages(decoder) else stages

    def _rest(
        self, layout: FoldedLayout, pipeline: StagePipeline
    ) -> tuple[float, RankBlocks, dict[str, float]]:
        """Return the busiest rank's seconds of a micro-batch, that rank, and the other parts."""
        busy = pipeline.busy
        slowest = max(self.stages.ranks(layout), key=lambda rank: busy[rank.ranks[0]])
        rest = {
            "gradients": self.gradients(layout, pipeline),
            "optimizer": self.optimizer_seconds(layout, layout.offload_optimizer),
        }
        if self.target.between_steps:
            rest["between steps"] = self.target.between_steps
        return max(busy) / pipeline.num_micro_batches, slowest, rest

    def _stage(
        self, stage: StageBlocks, blocks: tuple[BlockSeconds, ...], ends: tuple[float, float]
    ) -> Passes:
        has_weights = self.job.tuning.trains("head")
        share = FORWARD_OF_BOTH if has_weights else 1 / 2
        head = share * stage.heads(self.job.decoder) * ends[1]
        embedding = stage.has_embedding * ends[0]
        forward, weight = head + FORWARD_OF_BOTH * embedding, head * has_weights
        grad_input = head + (1 - FORWARD_OF_BOTH) * embedding
        for count, block in counted(stage, blocks):
            forward += count * block.forward
            weight += count * block.weight
            grad_input += count * (block.backward - block.weight)
        return Passes(forward=forward, grad_input=grad_input, grad_weight=weight)

    @once(lambda pipeline: pipeline)
    def _played(self, pipeline: StagePipeline) -> float:
        """Return the seconds of a pipeline; layouts that differ in their states share it."""
        return play(pipeline)

    def _parts(self, rank: RankBlocks, layout: FoldedLayout, batches: int) -> dict[str, float]:
        parts: dict[str, float] = {}
        for count, block in counted(rank, self.blocks.seconds(layout)):
            for name, seconds in block.parts.items():
                parts[name] = parts.get(name, 0.0) + batches * count * seconds
        embedding, head = self.blocks.ends(layout)
        parts["embedding"] = batches * rank.has_embedding * embedding
        parts["head"] = batches * rank.heads(self.job.decoder) * head
        if layout.offload_activations:
            plain = self.pipeline(replace(layout, offload_activations=0.0)).stages[0]
            parts["offload"] = batches * sum(self._waits_for_copies(layout, plain))
        return parts

    def _send(self, layout: FoldedLayout) -> float:
        if layout.pp == 1:
            return 0.0
        tokens = layout.micro_batch * self.job.length / (layout.cp * layout.tp)
        span = self.device.span(2, layout.stage_ranks)
        return self.device.collective("send", span, ELEMENT * tokens * self.job.decoder.d_model)
