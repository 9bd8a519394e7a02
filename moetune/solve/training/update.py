"""Time of a step's gradients, parameters and optimizer, beside and behind its passes."""

from dataclasses import dataclass, field

from moetune.domain.optimizers import optimizer_of
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.training.activations import ELEMENT
from moetune.solve.training.machine import DevicePrices
from moetune.solve.training.offload import HOST_ADAM_SECONDS
from moetune.solve.training.parameters import rank_parameters
from moetune.solve.training.pipeline import StagePipeline
from moetune.solve.training.stages import DecoderStages

_SHARDS_GRADIENTS = 2
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePrices:
    """Prices of what the replicas do together, of the rank with most parameters.

    Not safe for several threads.

    Args:
        target: the runtime that the prices are for.
    """

    job: TrainingJob
    device: DevicePrices
    stages: DecoderStages
    target: Target
    _parameters: dict[_Key, tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False
    )

    def gradients(self, layout: FoldedLayout, pipeline: StagePipeline) -> float:
        """Return the exposed time of the reduction of gradients and the gathering of parameters.

        They run beside the last micro-batch's backward pass and the first one's forward pass on
        the busiest rank, as far as these are long. Sharded gradients are reduced after each
        micro-batch. Sharded parameters are gathered before each pass, and before a backward pass
        on the links of its reduction.
        """
        passes = pipeline.busiest_passes if self.target.hides_gradients else (0.0, 0.0)
        return self._behind(layout, *passes, num_micro_batches=pipeline.num_micro_batches)

    def exposed_gradients(self, layout: FoldedLayout) -> float:
        """Return `gradients` where no passes hide them; nothing where these may hide all."""
        if self.target.hides_gradients:
            return 0.0
        num = self.job.global_batch // (layout.micro_batch * layout.dp)
        return self._behind(layout, 0.0, 0.0, num_micro_batches=num)

    def _behind(
        self, layout: FoldedLayout, forward: float, backward: float, *, num_micro_batches: int
    ) -> float:
        """Return the exposed time beside passes of so many seconds."""
        dense, experts = self._most_parameters(layout)
        data = self.device.span(layout.dp * layout.cp, layout.tp)
        replicas = self.device.span(layout.edp, layout.ep * layout.etp)
        summed = optimizer_of(self.job.optimizer).gradient_bytes
        reduced = gathered = 0.0
        for count, span in ((dense, data), (experts, replicas)):
            reduced += self.device.collective("reduce_scatter", span, summed * count)
            gathered += self.device.collective("all_gather", span, ELEMENT * count / span.size)
        ahead, num = max(0.0, gathered - forward), num_micro_batches
        if layout.zero > _SHARDS_GRADIENTS:
            return num * (ahead + max(0.0, reduced + gathered - backward))
        behind = max(0.0, reduced - backward)
        return ahead + behind * (num if layout.zero == _SHARDS_GRADIENTS else 1)

    def replica_seconds(self, layout: FoldedLayout) -> float:
        """Return what replicas of hot experts take in a step, hidden by nothing.

        Two all-to-alls of each layer: parts of the gradients to the replicas that sum them, and of
        the values behind the optimizer. Of the pipeline rank that takes longest.
        """
        job, span = self.job, self.device.span(layout.ep, layout.etp)
        each = [0.0] * len(job.decoder.kinds)
        for number, kind in enumerate(job.decoder.kinds):
            if kind.routed is not None and (sent := job.summed_experts(kind.routed, layout.ep)):
                num_bytes = sent / 2 * kind.routed.expert_parameters * ELEMENT
                num_bytes *= span.size / (span.size - 1)  # of which each rank keeps one part
                each[number] = 2 * self.device.collective("all_to_all", span, num_bytes)
        if not any(each):
            return 0.0
        ranks = self.stages.ranks(layout)
        return max(
            sum(count * seconds for count, seconds in zip(one.counts, each, strict=True))
            for one in ranks
        )

    def optimizer_seconds(self, layout: FoldedLayout, on_host: float) -> float:
        """Return the optimizer's seconds with a share of it on the host."""
        dense, experts = self._most_parameters(layout)
        shards = (layout.dp * layout.cp, layout.edp) if layout.zero else (1, 1)
        each = optimizer_of(self.job.optimizer).moved_bytes
        count = dense / shards[0] + experts / shards[1]
        device = self.device.moved((1 - on_host) * each * count)
        return device + on_host * count * HOST_ADAM_SECONDS

    def host_seconds(self, layout: FoldedLayout, share: float) -> float:
        """Return what the host takes at least with a share of the optimizer, of ZeRO stage 1."""
        if not share:
            return 0.0
        dense, experts = self._most_parameters(layout)
        count = dense / (layout.dp * layout.cp) + experts / layout.edp
        return share * count * HOST_ADAM_SECONDS

    def _most_parameters(self, layout: FoldedLayout) -> tuple[float, float]:
        pipeline = layout.pp, layout.vpp, layout.order, layout.stages
        key = layout.tp, layout.ep * layout.etp, *pipeline
        found = self._parameters.get(key)
        if found is None:
            decoder = self.job.decoder
            added = self.job.added_places
            every = (
                rank_parameters(decoder, layout, one, added) for one in self.stages.ranks(layout)
            )
            found = self._parameters[key] = max(every, key=sum)
        return found
