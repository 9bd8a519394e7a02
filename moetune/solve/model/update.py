"""Time of the replicas' common work in a training step: gradients, parameters and optimizer."""

from dataclasses import dataclass

from moetune.domain.once import Tables, once, once_for
from moetune.domain.optimizers import Optimizer
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.model.activations import ELEMENT, GEMM_INPUT, SHARDS_GRADIENTS, shard_of
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.muon import shared_seconds
from moetune.solve.model.passes import NO_ROOM, WITHOUT_END, Room
from moetune.solve.model.pipeline import DecoderStages, Parameters, counted
from moetune.solve.model.trained import TrainedParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePrices(Tables):
    """Prices of the replicas' common work, on the rank with most parameters."""

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
        return self.target.optimizer(self.job)

    def exposed_seconds(self, layout: FoldedLayout, room: Room) -> float:
        """Return the exposed time of reducing gradients and gathering parameters.

        They overlap the last micro-batch's backward pass and the first micro-batch's forward pass
        as far as there is room, unless the target hides none. Sharded gradients are reduced after
        each micro-batch. Sharded parameters are gathered before each pass; before a backward pass
        they use the links of its reduction.
        """
        held, trained, blocks = self._most_parameters(layout)
        num, shards_all = self.job.micro_batches(layout), layout.zero > SHARDS_GRADIENTS
        reduced, gathered = self._alone(layout, held, trained)
        if not self.target.hides_gradients:
            if layout.offload_optimizer and self.target.offloads_states:
                return num * self._over_host(layout, held, blocks, reduced + 2 * gathered, room)
            return num * (reduced + 2 * gathered) if shards_all else reduced + gathered
        if shards_all:
            shown = _block_by_block(reduced, gathered, blocks, room)
            return num * (shown + self._copies_of_blocks(held, trained))
        if self._optimizer.is_muon:  # Muon gathers behind its step
            room = room._replace(forward=0.0)
        ahead, behind = max(0.0, gathered - room.forward), max(0.0, reduced - room.backward)
        return ahead + behind * (num if layout.zero == SHARDS_GRADIENTS else 1)

    def _copies_of_blocks(self, held: Parameters, trained: Parameters) -> float:
        """Return the seconds to copy gathered blocks out of a buffer, and gradients into it.

        The compute stream does it (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
        """
        if not self.target.kernels.copies:
            return 0.0
        fetched = 2 * (ELEMENT + ELEMENT) * sum(held)
        stored = (ELEMENT + self._optimizer.gradient_bytes) * sum(trained)
        return self.device.memory_seconds(fetched + stored)

    def shares_link(self, layout: FoldedLayout) -> bool:
        """Return whether ZeRO stage 3 gathers over the link that exchanges tokens."""
        if layout.zero <= SHARDS_GRADIENTS or not self.job.decoder.num_moe_layers:
            return False
        exchange = self.device.span(layout.ep * layout.etp, 1)
        data = self.device.span(layout.dp * layout.cp, layout.tp)
        return exchange.size > 1 and (exchange.nodes > 1) == (data.nodes > 1)

    def least_of_gradients(self, layout: FoldedLayout) -> float:
        """Return a lower bound on `exposed_seconds` for any passes."""
        # Overlap may cost computation more than gradients gain.
        return min(self.exposed_seconds(layout, room) for room in (WITHOUT_END, NO_ROOM))

    def _alone(
        self, layout: FoldedLayout, held: Parameters, trained: Parameters
    ) -> tuple[float, float]:
        """Return the seconds to reduce gradients, and to gather what changes; at stage 3 all."""
        data = self.device.span(layout.dp * layout.cp, layout.tp)
        replicas = self.device.span(layout.edp, layout.ep * layout.etp)
        summed, reduced, gathered = self._optimizer.gradient_bytes, 0.0, 0.0
        changed = held if layout.zero > SHARDS_GRADIENTS else trained
        # MXFP8 is gathered in bfloat16, through the buffer of gradients, and then rounded.
        is_narrow = self.target.keeps_narrow_weights and self.job.dtype != "mxfp8"
        sent = GEMM_INPUT[self.job.dtype] if is_narrow else ELEMENT
        for count, fetched, span in zip(trained, changed, (data, replicas), strict=True):
            reduced += self.device.collective("reduce_scatter", span, summed * count)
            if self._optimizer.is_muon:  # Muon all-reduces gradients
                reduced += self.device.collective("all_gather", span, summed * count / span.size)
            gathered += self.device.collective("all_gather", span, sent * fetched / span.size)
        return reduced, gathered

    def _over_host(
        self, layout: FoldedLayout, held: Parameters, num: int, sent: float, room: Room
    ) -> float:
        """Return the exposed time of a micro-batch's copies of states from and to host memory.

            max(0, max(fetch, store, link) - computed) + (fetch + store + link) / blocks

        Copies in both directions and the link overlap the computation. The first block is fetched
        before it, and the last block's gradients are stored after it. Each pass fetches parameters.
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
        """Return a rank's optimizer time; by default that of the rank with most parameters."""
        seconds = 0.0
        if trained is None:
            trained = self._most_parameters(layout)[1]
            seconds = self._newton_schulz(layout) if self._optimizer.is_muon else 0.0
        count = shard_of(layout, *trained) if layout.zero else sum(trained)
        moved = (1 - on_host) * self._optimizer.moved_bytes * count
        seconds += self.device.memory_seconds(moved)
        return seconds + on_host * count * self.device.host_adam_seconds

    @once_for("dp", "cp", "tp", "ep", "etp", "pp", "vpp", "schedule", "stages", "zero")
    def _newton_schulz(self, layout: FoldedLayout) -> float:
        """Return a replica's seconds of Muon's iterations, on the rank with the most."""
        sharers = (layout.dp * layout.cp, layout.edp) if layout.zero else (1, 1)
        matrices = self.trained.orthogonal(layout)
        return max(
            shared_seconds(self.device, counted(rank, matrices), sharers)
            for rank in self.stages.ranks(layout)
        )

    @once_for("tp", "ep", "etp", "pp", "vpp", "schedule", "stages")
    def _most_parameters(self, layout: FoldedLayout) -> tuple[Parameters, Parameters, int]:
        """Return the fullest rank's parameters on a device, those that train, and its blocks."""
        rank = max(
            self.stages.ranks(layout), key=lambda rank: sum(self.stages.parameters(layout, rank))
        )
        held, trained = self.stages.parameters(layout, rank), self.trained.of_rank(layout, rank)
        return held, trained, max(1, sum(rank.counts))


def _block_by_block(reduced: float, gathered: float, num: int, room: Room) -> float:
    """Return the exposed time of ZeRO stage 3 in one micro-batch, with one block fetched ahead.

        2·g + r + (n - 1)·(max(0, g - F/n) + max(0, g + r - B/n))

    g and r are a block's gather and reduction, F and B the room of the passes of n blocks. The
    first gather of each pass and the last reduction overlap nothing.
    """
    reduce, gather = reduced / num, gathered / num
    later = max(0.0, gather - room.forward / num)
    later += max(0.0, gather + reduce - room.backward / num)
    return 2 * gather + reduce + (num - 1) * later
