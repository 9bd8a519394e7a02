"""Time of a training step under a layout: blocks, pipeline, gradients and optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import fsum

from moetune.domain.once import Tables, once
from moetune.domain.optimizers import Optimizer
from moetune.domain.pipeline import SPLITTING, StageLetters
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.model.activations import ELEMENT, SHARDS_GRADIENTS, block_modules, shard_of
from moetune.solve.model.blocks import BlockTable
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.muon import shared_seconds
from moetune.solve.model.passes import (
    FORWARD_OF_BOTH,
    NO_ROOM,
    WITHOUT_END,
    BlockSeconds,
    Passes,
    Room,
)
from moetune.solve.model.pipeline import (
    DecoderStages,
    Parameters,
    RankBlocks,
    StageBlocks,
    StagePipeline,
    balanced_stages,
    counted,
    least_seconds,
    play,
)
from moetune.solve.model.trained import TrainedParameters

_ROUNDING = 1e-12
_SLOWER = 1 + 1e-6
"""Factor on collectives' times that shows how much of a step follows them."""
_SEEN = 1e-6
"""Least share of a step that follows collectives: less is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """A step's time, in seconds as of `TrainingStep`.

    Args:
        parts: seconds on the slowest pipeline rank by name, all micro-batches; they add up to
            `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]
    hidden_by_shared_experts: float = 0.0
    bound_by_host: float = 0.0
    bound_by_replicas: float = 0.0


def _of_micro_batch(layout: FoldedLayout) -> tuple[object, ...]:
    """Return what the seconds of a micro-batch depend on."""
    return (
        layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.dispatcher,
        layout.overlap, layout.degree, layout.recompute, layout.cuda_graphs,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePrices(Tables):
    """Prices of what the replicas do together, of the rank with most parameters."""

    job: TrainingJob
    device: DevicePrices
    stages: DecoderStages
    target: Target

    @property
    @once(lambda: ())
    def trained(self) -> TrainedParameters:
        """Parameters that have gradients."""
        return TrainedParameters(self.stages, self.job.tuning, self.target)

    @property
    def _optimizer(self) -> Optimizer:
        return self.target.optimizer(self.job.optimizer)

    def exposed_seconds(self, layout: FoldedLayout, room: Room) -> float:
        """Return the exposed time of the reduction of gradients and the gathering of parameters.

        They run beside the last micro-batch's backward pass and the first one's forward pass, as
        far as there is room, or are exposed where the target hides none. Sharded gradients are
        reduced after each micro-batch. Sharded parameters are gathered before each pass, and
        before a backward pass on the links of its reduction.
        """
        (held, trained, blocks), num = (
            self._most_parameters(layout), self.job.micro_batches(layout)
        )  # fmt: skip
        if not self.target.hides_gradients:
            reduced, gathered = self._alone(layout, held, trained)
            if layout.offload_optimizer and self.target.offloads_states:
                return num * self._over_host(layout, held, blocks, reduced + 2 * gathered, room)
            shards_all = layout.zero > SHARDS_GRADIENTS
            return num * (reduced + 2 * gathered) if shards_all else reduced + gathered
        if layout.zero > SHARDS_GRADIENTS:
            return num * self._block_by_block(layout, held, trained, blocks, room)
        reduced, gathered = self._alone(layout, held, trained)
        if self._optimizer.is_muon:  # which gathers behind its step
            room = room._replace(forward=0.0)
        ahead, behind = max(0.0, gathered - room.forward), max(0.0, reduced - room.backward)
        return ahead + behind * (num if layout.zero == SHARDS_GRADIENTS else 1)

    def _block_by_block(
        self, layout: FoldedLayout, held: Parameters, trained: Parameters, num: int, room: Room
    ) -> float:
        """Return the exposed time of ZeRO stage 3 in one micro-batch, with one block fetched ahead.

            2·g + r + (n - 1)·(max(0, g - F/n) + max(0, g + r - B/n)) + copies

        g and r are a block's gather and reduction, F and B the room of the passes of n blocks: the
        first gather of each pass and the last reduction have nothing beside them. Gathered blocks
        are copied out of a buffer, and gradients into it, on the stream that computes
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
        """
        reduced, gathered = self._alone(layout, held, trained)
        reduce, gather = reduced / num, gathered / num
        later = max(0.0, gather - room.forward / num)
        later += max(0.0, gather + reduce - room.backward / num)
        shown = 2 * gather + reduce + (num - 1) * later
        if not self.target.kernels.copies:
            return shown
        fetched = 2 * (ELEMENT + ELEMENT) * sum(held)
        stored = (ELEMENT + self._optimizer.gradient_bytes) * sum(trained)
        return shown + self.device.memory_seconds(fetched + stored)

    def shares_link(self, layout: FoldedLayout) -> bool:
        """Return whether ZeRO stage 3 gathers over the link that exchanges tokens."""
        if layout.zero <= SHARDS_GRADIENTS or not self.job.decoder.num_moe_layers:
            return False
        exchange = self.device.span(layout.ep * layout.etp, 1)
        data = self.device.span(layout.dp * layout.cp, layout.tp)
        return exchange.size > 1 and (exchange.nodes > 1) == (data.nodes > 1)

    def least_of_gradients(self, layout: FoldedLayout) -> float:
        """Return what `exposed` is at least, whatever the passes."""
        # Computation may lose more beside gradients than these gain.
        return min(self.exposed_seconds(layout, room) for room in (WITHOUT_END, NO_ROOM))

    def _alone(
        self, layout: FoldedLayout, held: Parameters, trained: Parameters
    ) -> tuple[float, float]:
        """Return the seconds to reduce gradients and to gather parameters, with no overlap.

        Gathered are those that an optimizer's step changes, and under ZeRO stage 3 all.
        """
        data = self.device.span(layout.dp * layout.cp, layout.tp)
        replicas = self.device.span(layout.edp, layout.ep * layout.etp)
        summed, reduced, gathered = self._optimizer.gradient_bytes, 0.0, 0.0
        changed = held if layout.zero > SHARDS_GRADIENTS else trained
        for count, fetched, span in zip(trained, changed, (data, replicas), strict=True):
            reduced += self.device.collective("reduce_scatter", span, summed * count)
            if self._optimizer.is_muon:  # whose gradients are reduced to all
                reduced += self.device.collective("all_gather", span, summed * count / span.size)
            gathered += self.device.collective("all_gather", span, ELEMENT * fetched / span.size)
        return reduced, gathered

    def _over_host(
        self, layout: FoldedLayout, held: Parameters, num: int, sent: float, room: Room
    ) -> float:
        """Return the exposed time of a micro-batch's copies of states from and to host memory.

            max(0, max(fetch, store, link) - computed) + (fetch + store + link) / blocks

        Copies in both directions and the link work beside the computation; the first block is
        fetched before it, and the last one's gradients are stored behind it. Parameters are fetched
        for each pass.
        """
        count = shard_of(layout, *held)
        ways = (
            2 * self.device.copy_seconds("h2d", ELEMENT * count),
            self.device.copy_seconds("d2h", self._optimizer.gradient_bytes * count), sent,
        )  # fmt: skip
        waited = max(0.0, max(ways) - room.forward - room.backward)
        return waited + sum(ways) / num

    def optimizer_seconds(
        self, layout: FoldedLayout, on_host: float, trained: Parameters | None = None
    ) -> float:
        """Return a rank's seconds of the optimizer; by default of the rank with most parameters."""
        orthogonal = 0.0
        if trained is None:
            trained = self._most_parameters(layout)[1]
            orthogonal = self._newton_schulz(layout) if self._optimizer.is_muon else 0.0
        count = shard_of(layout, *trained) if layout.zero else sum(trained)
        device = orthogonal + self.device.memory_seconds(
            (1 - on_host) * self._optimizer.moved_bytes * count
        )
        return device + on_host * count * self.device.host_adam_seconds

    @once(
        lambda layout: (
            layout.dp, layout.cp, layout.tp, layout.ep, layout.etp, layout.pp, layout.vpp,
            layout.order, layout.stages, layout.zero,
        )
    )  # fmt: skip
    def _newton_schulz(self, layout: FoldedLayout) -> float:
        """Return a replica's seconds of Muon's iterations, on the rank that has most."""
        sharers = (layout.dp * layout.cp, layout.edp) if layout.zero else (1, 1)
        matrices = self.trained.orthogonal(layout)
        return max(
            shared_seconds(self.device, counted(rank, matrices), sharers)
            for rank in self.stages.ranks(layout)
        )

    @once(
        lambda layout: (
            layout.tp, layout.ep * layout.etp, layout.pp, layout.vpp, layout.order, layout.stages,
        )
    )  # fmt: skip
    def _most_parameters(self, layout: FoldedLayout) -> tuple[Parameters, Parameters, int]:
        """Return the parameters of a device of the rank that has most, and its blocks.

        Those that are held, and those that train.
        """
        ranks = (
            (
                self.stages.parameters(layout, rank), self.trained.of_rank(layout, rank),
                max(1, sum(rank.counts)),
            )
            for rank in self.stages.ranks(layout)
        )  # fmt: skip
        return max(ranks, key=lambda rank: sum(rank[0]))


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
        seconds = self._played(pipeline)
        busiest, slowest, rest = self._rest(layout, pipeline)
        parts = self._parts(slowest, layout, pipeline.num_micro_batches)
        waits = seconds - pipeline.num_micro_batches * busiest
        # Without a pipeline both are one sum, but of floats in another order.
        parts["bubble and sends"] = waits if waits > _ROUNDING * seconds else 0.0
        blocks = counted(slowest, self.blocks.seconds(layout))
        num = pipeline.num_micro_batches
        return StepSeconds(
            seconds=seconds + sum(rest.values()), parts=parts | rest,
            hidden_by_shared_experts=num
            * sum(count * block.hidden_by_shared for count, block in blocks),
            bound_by_host=num * sum(count * block.bound_by_host for count, block in blocks),
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
        optimizer = self.optimizer_seconds(layout, layout.offload_optimizer)
        return self.least_of_passes(layout) + optimizer

    def least_of_passes(self, layout: FoldedLayout) -> float:
        """Return seconds of the pipeline and the gradients at least, without the optimizer."""
        pipeline = self.pipeline(layout)
        return least_seconds(pipeline) + self.gradients(layout, pipeline)

    def gradients(self, layout: FoldedLayout, pipeline: StagePipeline) -> float:
        """Return the exposed time of gradients and parameters."""
        return self.exposed_seconds(layout, self._room(layout, pipeline))

    def _bound_by_replicas(
        self, layout: FoldedLayout, pipeline: StagePipeline, exposed: float
    ) -> float:
        """Return by how much more than its exposed part a step follows collectives of replicas.

            dT/dc - T at c = 1, T(c·t, R) = c·T(t, R / c)

        T is exposed of collectives of t seconds in the room R. Where t is above R the step follows
        all of t, so that the difference is R; below it follows none.
        """
        room = Room(*(seconds / _SLOWER for seconds in self._room(layout, pipeline)))
        slower = _SLOWER * self.exposed_seconds(layout, room)
        more = (slower - exposed) / (_SLOWER - 1) - exposed
        return more if more > _SEEN * max(pipeline.busy) else 0.0

    def _room(self, layout: FoldedLayout, pipeline: StagePipeline) -> Room:
        """Return what collectives of gradients and parameters can run beside."""
        if self.shares_link(layout):
            busiest = pipeline.busy.index(max(pipeline.busy))
            rank = next(rank for rank in self.stages.ranks(layout) if busiest in rank.ranks)
            return self.blocks.room(rank, layout)
        return Room(*pipeline.busiest_passes)

    def rounds_at_least(self, layout: FoldedLayout) -> float:
        """Return the least time T of a pipeline over that of one micro-batch in the whole model, S.

            T ≥ S·m/p, and under 1F1B with one stage a rank T ≥ S / (1 − (1 − 1/m)^p)

        There are m micro-batches and p ranks. The second is what stages take that all bind at once:
        rank r has m·t_r + Σ_{s < r} t_s.
        """
        if layout.order != "1f1b":
            return self.job.micro_batches(layout) / layout.pp
        return 1 / (1 - (1 - 1 / self.job.micro_batches(layout)) ** layout.pp)

    @once(_of_micro_batch)
    def micro_batch_seconds(self, layout: FoldedLayout) -> float:
        """Return the seconds of one micro-batch in all of the model, whatever the pipeline."""
        blocks, (embedding, head) = self.blocks.seconds(layout), self.blocks.ends(layout)
        seconds = embedding + head * (1 + len(self.job.decoder.predictions))
        for count, block in counted(self.stages.whole, blocks):
            seconds += count * block.both
        return seconds

    def micro_batch_at_least(self, layout: FoldedLayout) -> float:
        """Return what `micro_batch_seconds` of a layout with chunks is at least.

        No chunks are priced for it.
        """
        plain = layout.changed(overlap="none", degree=None)
        return self.micro_batch_seconds(plain) - self.blocks.most_saved(layout)

    def pipeline(self, layout: FoldedLayout) -> StagePipeline:
        """Return the layout's pipeline."""
        blocks, ends = self.blocks.seconds(layout), self.blocks.ends(layout)
        cut = self.stages.cut(layout)
        distinct = [self._stage(stage, blocks, ends) for stage in cut.distinct]
        stages = [distinct[which] for which in cut.which]
        if layout.order in SPLITTING:  # torch splits no backward pass that has no input
            stages[0] = Passes(forward=stages[0].forward, grad_input=stages[0].backward)
        if layout.offload_activations:
            stages[0] += self._waits_for_copies(layout, stages[0])
        return StagePipeline(
            schedule=layout.order, pp=layout.pp, stages=tuple(stages),
            num_micro_batches=self.job.micro_batches(layout),
            send_seconds=self._send(layout), hides_sends=layout.order != "1f1b",
        )  # fmt: skip

    def _waits_for_copies(self, layout: FoldedLayout, stage: Passes) -> Passes:
        """Return what copies of activations take longer than the pass that they run beside."""
        size = layout.offloaded_share(self.job.decoder) * self._activation_bytes(layout)
        out, back = self.device.copy_seconds("d2h", size), self.device.copy_seconds("h2d", size)
        return Passes(max(0.0, out - stage.forward), max(0.0, back - stage.backward))

    @once(lambda layout: (layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch))
    def _activation_bytes(self, layout: FoldedLayout) -> float:
        """Return the bytes of all blocks' activations for one micro-batch."""
        decoder = self.job.decoder
        kinds = zip(self.stages.whole.counts, decoder.kinds, strict=True)
        modules = ((n, block_modules(kind, self.job, layout, self.target)) for n, kind in kinds)
        return fsum(n * sum(sizes.values()) for n, sizes in modules)

    @once(lambda layout: (_of_micro_batch(layout), layout.pp, layout.vpp, layout.order))
    def balanced_stages(self, layout: FoldedLayout) -> StageLetters | None:
        """Return stages whose ranks take as equally long as blocks allow; None for equal ones."""
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
        busy = [seconds / pipeline.num_micro_batches for seconds in pipeline.busy]
        slowest = max(self.stages.ranks(layout), key=lambda rank: busy[rank.ranks[0]])
        rest = {
            "gradients": self.gradients(layout, pipeline),
            "optimizer": self.optimizer_seconds(layout, layout.offload_optimizer),
        }
        return max(busy), slowest, rest

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
        """Return the seconds of a pipeline, which layouts share that differ in their states."""
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
