"""Memory of a pipeline rank, part by part.

Bytes of the device that a training step takes at its peak with Megatron-Core's distributed
optimizer: bfloat16 parameters, gradients and states by the optimizer's own bytes, activations of
the micro-batches in work, and what the libraries take.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from moetune.domain.optimizers import optimizer_of
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.training.activations import ELEMENT, block_modules, workspace_bytes
from moetune.solve.training.offload import (
    BUFFERED_BLOCKS,
    HOST_OPTIMIZER_BYTES,
    offloaded_share,
)
from moetune.solve.training.parameters import rank_parameters
from moetune.solve.training.schedule import most_live
from moetune.solve.training.stages import DecoderStages, RankBlocks

_GIB = 2**30
_ALONE = FoldedLayout()
LIBRARY_BYTES = 1.5 * _GIB
"""CUDA context, cuBLAS and NCCL buffers outside the allocator; stated, not measured."""
FRAGMENTATION = 0.05
"""Share of the activations that an allocator with expandable segments loses; stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one pipeline rank's device, by part; they add up to `peak_bytes`.

    Args:
        activations: those among the parts by module, of all micro-batches in work.
        host_bytes: of what is in host memory, of one device.
    """

    rank: int
    parts: Mapping[str, float]
    activations: Mapping[str, float]
    host_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        """The sum."""
        return sum(self.parts.values())

    @property
    def allocated_bytes(self) -> float:
        """What `torch.cuda.max_memory_allocated` counts: tensors, not what is around them."""
        return self.peak_bytes - self.parts["fragmentation"] - self.parts["libraries"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Memory of a job's layouts, each part computed once. Not safe for several threads.

    Args:
        logit_bytes: of one logit at the loss, with its gradient (`Target.logit_bytes`).
    """

    job: TrainingJob
    stages: DecoderStages
    logit_bytes: int = 6
    _blocks: dict[tuple[object, ...], list[tuple[dict[str, float], float]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _parameters: dict[tuple[object, ...], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False
    )
    _needs: dict[tuple[object, ...], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False
    )

    def peak(self, layout: FoldedLayout) -> RankMemory:
        """Return the memory of the pipeline rank that has most."""
        ranks = (self.of_rank(layout, one) for one in self.stages.ranks(layout))
        return max(ranks, key=lambda one: one.peak_bytes)

    def needs(self, layout: FoldedLayout) -> tuple[float, float]:
        """Return the bytes of the fullest device, and of its host: a search asks them again."""
        key = (
            layout.dp, layout.cp, layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp,
            layout.micro_batch, layout.recompute, layout.zero, layout.order, layout.stages,
            layout.overlap == "batch", layout.offload_activations, layout.offload_optimizer,
        )  # fmt: skip
        found = self._needs.get(key)
        if found is None:
            memory = self.peak(layout)
            found = self._needs[key] = memory.peak_bytes, memory.host_bytes
        return found

    def least(self, layout: FoldedLayout, *, on_host: float) -> float:
        """Return bytes that the fullest device needs at least, however the stages are cut.

        The parameters, gradients and states of a mean rank: the fullest has no less. Activations
        are left out.

        Args:
            on_host: the largest share of the optimizer that the host may keep.
        """
        [whole] = self.stages.ranks(_ALONE)
        dense, experts = (one / layout.pp for one in self._parameters_of(layout, whole))
        return LIBRARY_BYTES + sum(self._states(layout, dense, experts, on_host=on_host))

    def of_every_rank(self, layout: FoldedLayout) -> tuple[RankMemory, ...]:
        """Return the memory of each pipeline rank, in their order."""
        found = {
            rank: self.of_rank(layout, replace(one, ranks=(rank,)))
            for one in self.stages.ranks(layout)
            for rank in one.ranks
        }
        return tuple(found[rank] for rank in sorted(found))

    def of_rank(self, layout: FoldedLayout, rank: RankBlocks) -> RankMemory:
        """Return the memory of that of such pipeline ranks which keeps most activations."""
        dense, experts = self._parameters_of(layout, rank)
        count, shard = dense + experts, _shard(layout, dense, experts)
        live = self._live(layout)
        fullest = max(rank.ranks, key=live.__getitem__)
        modules, workspace = self._activations(layout, rank, live[fullest])
        share = offloaded_share(layout, self.job)
        host = share * sum(modules.values())
        if share:
            buffers = min(1.0, BUFFERED_BLOCKS / self.job.decoder.num_layers)
            kept = min(1.0, 1 - share + buffers)
            modules = {name: kept * size for name, size in modules.items()}
        activations = sum(modules.values())
        optimizer, on_host = optimizer_of(self.job.optimizer), layout.offload_optimizer
        parameters, gradients, states = self._states(layout, dense, experts, on_host=on_host)
        host += on_host * HOST_OPTIMIZER_BYTES * (shard if layout.zero else count)
        logits = self._logits(layout) if rank.has_head or rank.has_predictions else 0.0
        copied = (1 - on_host) * optimizer.step_bytes * (shard if layout.zero else count)
        parts = {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": states,
            "activations": activations,
            "workspace": workspace,
            "logits": logits,
            "optimizer step": max(0.0, copied - activations - workspace - logits),
            "fragmentation": FRAGMENTATION * (activations + workspace),
            "libraries": LIBRARY_BYTES,
        }
        return RankMemory(rank=fullest, parts=parts, activations=modules, host_bytes=host)

    def _parameters_of(self, layout: FoldedLayout, rank: RankBlocks) -> tuple[float, float]:
        key = layout.tp, layout.ep * layout.etp, rank
        found = self._parameters.get(key)
        if found is None:
            found = self._parameters[key] = rank_parameters(self.job.decoder, layout, rank)
        return found

    def _states(
        self, layout: FoldedLayout, dense: float, experts: float, *, on_host: float
    ) -> tuple[float, float, float]:
        """Return the bytes of so many parameters, of their gradients, and of their states."""
        count, shard = dense + experts, _shard(layout, dense, experts)
        states, gradients, parameters = (
            shard if layout.zero >= stage else count for stage in (1, 2, 3)
        )
        optimizer = optimizer_of(self.job.optimizer)
        return (
            ELEMENT * parameters,
            optimizer.gradient_bytes * gradients,
            (1 - on_host) * optimizer.state_bytes * states,
        )

    def _live(self, layout: FoldedLayout) -> tuple[float, ...]:
        """Return the micro-batches in work on each rank, in its blocks' worth."""
        batches = self.job.global_batch // (layout.micro_batch * layout.dp)
        return most_live(layout.order, layout.pp, layout.vpp, batches)

    def _activations(
        self, layout: FoldedLayout, rank: RankBlocks, live: float
    ) -> tuple[dict[str, float], float]:
        """Return the bytes of the micro-batches in work, and of the block being computed."""
        blocks = self._bytes_of_blocks(layout)
        if layout.overlap == "batch" and layout.pp > 1:
            live += 1 / layout.vpp  # one more stage's worth of warm-up
        modules: dict[str, float] = {}
        for count, (kept, _) in zip(rank.counts, blocks, strict=True):
            for name, size in kept.items():
                modules[name] = modules.get(name, 0.0) + live * count * size
        works = [work for count, (_, work) in zip(rank.counts, blocks, strict=True) if count]
        return modules, max(works, default=0.0)

    def _bytes_of_blocks(self, layout: FoldedLayout) -> list[tuple[dict[str, float], float]]:
        key = (layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.recompute)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = [
                (
                    block_modules(kind, self.job, layout),
                    workspace_bytes(kind, self.job, layout),
                )
                for kind in self.job.decoder.kinds
            ]
        return found

    def _logits(self, layout: FoldedLayout) -> float:
        """Return the logits and their gradient."""
        tokens = layout.micro_batch * self.job.length / layout.cp
        vocab = -(-self.job.decoder.vocab_size // layout.tp)
        return self.logit_bytes * tokens * vocab


def _shard(layout: FoldedLayout, dense: float, experts: float) -> float:
    """Return the parameters of one replica's shard."""
    return dense / (layout.dp * layout.cp) + experts / layout.edp
