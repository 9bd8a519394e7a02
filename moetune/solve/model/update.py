"""States of parameters: their bytes, and the time of their update next to and behind the passes.

From ZeRO stage 1 on a replica has its shard of the states alone, from stage 2 on of the gradients,
too, and under stage 3 of the parameters. Dense parameters have dp·cp replicas, experts edp.
"""

from dataclasses import dataclass

from moetune.domain.once import Tables, once
from moetune.domain.optimizers import Optimizer
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.model.activations import ELEMENT
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import NO_ROOM, WITHOUT_END, Room
from moetune.solve.model.stages import DecoderStages, Parameters

SHARDS_GRADIENTS = 2
"""The ZeRO stage, and those above it."""
WHOLE_BLOCKS = 2
"""Of a sharded model that a device has at once: the one that is computed and the next one.

Megatron-FSDP takes twice a block as the size of its queues (`suggested_communication_unit_size`).
"""


def shard_of(layout: FoldedLayout, dense: float, experts: float) -> float:
    """Return the parameters of one replica's shard."""
    return dense / (layout.dp * layout.cp) + experts / layout.edp


def state_bytes(
    layout: FoldedLayout, optimizer: Optimizer, dense: float, experts: float, *, on_host: float
) -> tuple[float, float, float]:
    """Return the bytes of so many parameters, of their gradients, and of their states.

    FSDP2 shards float32 parameters at every stage. At stage 2 what it gathers stays for the whole
    step, and gradients of micro-batches are added up whole
    (`torch/distributed/fsdp/_fully_shard/_fsdp_param.py`, `unsharded_accumulated_grad`).

    Args:
        on_host: share of the optimizer that the host keeps.
    """
    count, shard, zero = dense + experts, shard_of(layout, dense, experts), layout.zero
    is_whole = zero <= SHARDS_GRADIENTS
    parameters = optimizer.parameter_bytes * (count if is_whole else shard)
    gradients = optimizer.gradient_bytes * (shard if zero >= SHARDS_GRADIENTS else count)
    if optimizer.updates_parameters and is_whole:
        parameters = optimizer.parameter_bytes * shard + ELEMENT * count
        gradients += optimizer.gradient_bytes * count * (layout.pp > 1)
    return (
        parameters,
        gradients,
        (1 - on_host) * optimizer.state_bytes * (shard if zero else count),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePrices(Tables):
    """Prices of what the replicas do together, of the rank with most parameters.

    Args:
        target: the runtime that the prices are for.
    """

    job: TrainingJob
    device: DevicePrices
    stages: DecoderStages
    target: Target

    def gradients(self, layout: FoldedLayout, room: Room, *, num_micro_batches: int) -> float:
        """Return the exposed time of the reduction of gradients and the gathering of parameters.

        They run beside the last micro-batch's backward pass and the first one's forward pass, as
        far as there is room, or are exposed where the target hides none. Sharded gradients are
        reduced after each micro-batch. Sharded parameters are gathered before each pass, and
        before a backward pass on the links of its reduction.
        """
        (held, blocks), num = self._most_parameters(layout), num_micro_batches
        if not self.target.hides_gradients:
            reduced, gathered = self._alone(layout, held)
            if layout.offload_optimizer and self.target.offloads_states:
                return num * self._over_host(layout, held, blocks, reduced + 2 * gathered, room)
            shards_all = layout.zero > SHARDS_GRADIENTS
            return num * (reduced + 2 * gathered) if shards_all else reduced + gathered
        if layout.zero > SHARDS_GRADIENTS:
            return num * self._block_by_block(layout, held, blocks, room)
        reduced, gathered = self._alone(layout, held)
        ahead, behind = max(0.0, gathered - room.forward), max(0.0, reduced - room.backward)
        return ahead + behind * (num if layout.zero == SHARDS_GRADIENTS else 1)

    def _block_by_block(
        self, layout: FoldedLayout, held: Parameters, num: int, room: Room
    ) -> float:
        """Return what ZeRO stage 3 shows of one micro-batch, with one block fetched ahead.

            2·g + r + (n - 1)·(max(0, g - F/n) + max(0, g + r - B/n)) + copies

        g and r are a block's gather and reduction, F and B the room of the passes of n blocks: the
        first gather of each pass and the last reduction have nothing beside them. Gathered blocks
        are copied out of a buffer, and gradients into it, on the stream that computes
        (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
        """
        reduced, gathered = self._alone(layout, held)
        reduce, gather = reduced / num, gathered / num
        later = max(0.0, gather - room.forward / num)
        later += max(0.0, gather + reduce - room.backward / num)
        shown = 2 * gather + reduce + (num - 1) * later
        if not self.target.kernels.copies:
            return shown
        summed = self.target.optimizer(self.job.optimizer).gradient_bytes
        copied = 2 * (ELEMENT + ELEMENT) + ELEMENT + summed
        return shown + self.device.moved(copied * sum(held))

    def shares_link(self, layout: FoldedLayout) -> bool:
        """Return whether ZeRO stage 3 gathers over the link that exchanges tokens."""
        if layout.zero <= SHARDS_GRADIENTS or not self.job.decoder.num_moe_layers:
            return False
        exchange = self.device.span(layout.ep * layout.etp, 1)
        data = self.device.span(layout.dp * layout.cp, layout.tp)
        return exchange.size > 1 and (exchange.nodes > 1) == (data.nodes > 1)

    def least_of_gradients(self, layout: FoldedLayout) -> float:
        """Return `gradients` at least, whatever the passes."""
        num = self.job.micro_batches(layout)
        return min(
            self.gradients(layout, room, num_micro_batches=num) for room in (WITHOUT_END, NO_ROOM)
        )  # computation may lose more beside gradients than these gain

    def _alone(self, layout: FoldedLayout, held: Parameters) -> tuple[float, float]:
        """Return the seconds of a reduction and a gathering by themselves."""
        data = self.device.span(layout.dp * layout.cp, layout.tp)
        replicas = self.device.span(layout.edp, layout.ep * layout.etp)
        summed = self.target.optimizer(self.job.optimizer).gradient_bytes
        reduced = gathered = 0.0
        for count, span in zip(held, (data, replicas), strict=True):
            reduced += self.device.collective("reduce_scatter", span, summed * count)
            gathered += self.device.collective("all_gather", span, ELEMENT * count / span.size)
        return reduced, gathered

    def _over_host(
        self, layout: FoldedLayout, held: Parameters, num: int, sent: float, room: Room
    ) -> float:
        """Return what a micro-batch shows of states that are in host memory, and of their shards.

            max(0, max(fetch, store, link) - computed) + (fetch + store + link) / blocks

        Copies in both directions and the link work beside the computation; the first block is
        fetched before it, and the last one's gradients are stored behind it. Parameters are fetched
        for each pass.
        """
        count = shard_of(layout, *held)
        summed = self.target.optimizer(self.job.optimizer).gradient_bytes
        ways = (
            2 * self.device.copied("h2d", ELEMENT * count),
            self.device.copied("d2h", summed * count), sent,
        )  # fmt: skip
        waited = max(0.0, max(ways) - room.forward - room.backward)
        return waited + sum(ways) / num

    def optimizer_seconds(self, layout: FoldedLayout, on_host: float) -> float:
        """Return the optimizer's seconds with a share of it on the host."""
        held, _ = self._most_parameters(layout)
        each = self.target.optimizer(self.job.optimizer).moved_bytes
        count = shard_of(layout, *held) if layout.zero else sum(held)
        device = self.device.moved((1 - on_host) * each * count)
        return device + on_host * count * self.device.host_adam_seconds

    @once(
        lambda layout: (
            layout.tp, layout.ep * layout.etp,
            layout.pp, layout.vpp, layout.order, layout.stages,
        )
    )  # fmt: skip
    def _most_parameters(self, layout: FoldedLayout) -> tuple[Parameters, int]:
        """Return the parameters of a device of the rank that has most, and its blocks."""
        every = (
            (self.stages.parameters(layout, one), max(1, sum(one.counts)))
            for one in self.stages.ranks(layout)
        )
        return max(every, key=lambda one: sum(one[0]))
