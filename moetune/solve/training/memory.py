"""Memory of a pipeline rank, part by part.

Bytes of the device that a training step takes at its peak with Megatron-Core's distributed
optimizer: bfloat16 parameters, gradients and states by the optimizer's own bytes, activations of
the micro-batches in work, and what the libraries take.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moetune.domain.architecture import Block
from moetune.domain.optimizers import optimizer_of
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.training.activations import ELEMENT, block_modules, workspace_bytes
from moetune.solve.training.offload import (
    BUFFERED_BLOCKS,
    HOST_OPTIMIZER_BYTES,
    offloaded_share,
)
from moetune.solve.training.parameters import largest_sharded_block, rank_parameters
from moetune.solve.training.schedule import most_live
from moetune.solve.training.stages import DecoderStages, RankBlocks

_GIB = 2**30
_ALONE = FoldedLayout()
LIBRARY_BYTES = 1.5 * _GIB
"""CUDA context, cuBLAS and NCCL buffers outside the allocator; stated, not measured."""
FRAGMENTATION = 0.05
"""Share of the activations that an allocator with expandable segments loses; stated."""


_SHARDS_GRADIENTS = 2
"""The ZeRO stage, and those above it."""
_WHOLE_BLOCKS = 2
"""Of a sharded model that a device has at once."""
_Key = tuple[object, ...]
_PARTS = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "workspace", "logits",
    "optimizer step", "fragmentation", "libraries",
)  # fmt: skip


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


class _BlockBytes(NamedTuple):
    """Bytes of a kind of block for one micro-batch: what it keeps, and while it is computed."""

    modules: Mapping[str, float]
    total: float
    workspace: float


class _RankBytes(NamedTuple):
    """What a pipeline rank has whatever is sharded or in host memory.

    Args:
        live: micro-batches in work, in the blocks' worth.
        dense, experts: parameters of a device.
        block: those of the block that has most to shard.
        activations, workspace, logits: bytes.
    """

    rank: int
    counts: tuple[int, ...]
    live: float
    dense: float
    experts: float
    block: float
    activations: float
    workspace: float
    logits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Memory of a job's layouts, each part computed once. Not safe for several threads.

    Args:
        logit_bytes: of one logit at the loss, with its gradient (`Target.logit_bytes`).
    """

    job: TrainingJob
    stages: DecoderStages
    logit_bytes: int = 6
    _blocks: dict[_Key, list[_BlockBytes]] = field(default_factory=dict, init=False, repr=False)
    _parameters: dict[_Key, tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False
    )
    _ranks: dict[_Key, tuple[_RankBytes, ...]] = field(default_factory=dict, init=False, repr=False)

    def peak(self, layout: FoldedLayout) -> RankMemory:
        """Return the memory of the pipeline rank that has most."""
        ranks = self._bytes_of_ranks(layout)
        return self._memory(layout, max(ranks, key=lambda one: self._needs_of(layout, one)[0]))

    def needs(self, layout: FoldedLayout) -> tuple[float, float]:
        """Return the bytes of the fullest device, and of its host."""
        ranks = self._bytes_of_ranks(layout)
        if len(ranks) == 1:
            return self._needs_of(layout, ranks[0])
        return max(self._needs_of(layout, one) for one in ranks)

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
        return self._memory(layout, self._bytes_of_rank(layout, rank))

    def _memory(self, layout: FoldedLayout, rank: _RankBytes) -> RankMemory:
        parts, host = self._parts(layout, rank)
        kept = _kept(layout, self.job)
        modules: dict[str, float] = {}
        for count, block in zip(rank.counts, self._bytes_of_blocks(layout), strict=True):
            for name, size in block.modules.items():
                modules[name] = modules.get(name, 0.0) + kept * rank.live * count * size
        return RankMemory(
            rank=rank.rank,
            parts=dict(zip(_PARTS, parts, strict=True)),
            activations=modules,
            host_bytes=host,
        )

    def _needs_of(self, layout: FoldedLayout, rank: _RankBytes) -> tuple[float, float]:
        """Return the bytes of a rank's device, and of its host."""
        parts, host = self._parts(layout, rank)
        return sum(parts), host

    def _parts(self, layout: FoldedLayout, rank: _RankBytes) -> tuple[tuple[float, ...], float]:
        """Return the bytes of a rank's device by part, in the order of `_PARTS`, and its host's."""
        dense, experts, workspace, logits = rank.dense, rank.experts, rank.workspace, rank.logits
        sharded = dense + experts
        if layout.zero:
            sharded = _shard(layout, dense, experts)
        activations, host, on_host = rank.activations, 0.0, layout.offload_optimizer
        if layout.offload_activations:
            host = offloaded_share(layout, self.job) * activations
            activations *= _kept(layout, self.job)
        states = self._states(layout, dense, experts, on_host=on_host)
        host += on_host * HOST_OPTIMIZER_BYTES * sharded
        copied = (1 - on_host) * optimizer_of(self.job.optimizer).step_bytes * sharded
        return (
            *states,
            self._gathered(layout, rank),
            activations,
            workspace,
            logits,
            max(0.0, copied - activations - workspace - logits),
            FRAGMENTATION * (activations + workspace),
            LIBRARY_BYTES,
        ), host

    def _gathered(self, layout: FoldedLayout, rank: _RankBytes) -> float:
        """Return the bytes of what is sharded and yet whole for a while.

        Gradients before they are reduced, from ZeRO stage 2 on, and gathered parameters under stage
        3: of the block that is computed and of the next one (Megatron-FSDP takes twice a block as
        the size of its queues, `suggested_communication_unit_size`).
        """
        if layout.zero < _SHARDS_GRADIENTS:
            return 0.0
        element = optimizer_of(self.job.optimizer).gradient_bytes
        if layout.zero > _SHARDS_GRADIENTS:
            element += ELEMENT
        return element * min(_WHOLE_BLOCKS * rank.block, rank.dense + rank.experts)

    def _bytes_of_ranks(self, layout: FoldedLayout) -> tuple[_RankBytes, ...]:
        """Return what the ranks have whatever is sharded or in host memory."""
        key = (
            layout.dp, layout.cp, layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp,
            layout.micro_batch, layout.recompute, layout.order, layout.stages,
            layout.overlap == "batch",
        )  # fmt: skip
        found = self._ranks.get(key)
        if found is None:
            ranks = self.stages.ranks(layout)
            found = self._ranks[key] = tuple(self._bytes_of_rank(layout, one) for one in ranks)
        return found

    def _bytes_of_rank(self, layout: FoldedLayout, rank: RankBlocks) -> _RankBytes:
        dense, experts = self._parameters_of(layout, rank)
        every = self._live(layout)
        fullest = max(rank.ranks, key=every.__getitem__)
        live = every[fullest]
        if layout.overlap == "batch" and layout.pp > 1:
            live += 1 / layout.vpp  # one more stage's worth of warm-up
        blocks = self._bytes_of_blocks(layout)
        counted = [*zip(rank.counts, blocks, strict=True)]
        return _RankBytes(
            rank=fullest,
            counts=rank.counts,
            live=live,
            dense=dense,
            experts=experts,
            block=largest_sharded_block(self.job.decoder, layout, rank),
            activations=live * sum(count * block.total for count, block in counted),
            workspace=max((block.workspace for count, block in counted if count), default=0.0),
            logits=self._logits(layout) if rank.has_head or rank.has_predictions else 0.0,
        )

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

    def _bytes_of_blocks(self, layout: FoldedLayout) -> list[_BlockBytes]:
        """Return the bytes of each kind of block for one micro-batch."""
        key = (layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch, layout.recompute)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = [
                _block_bytes(kind, self.job, layout) for kind in self.job.decoder.kinds
            ]
        return found

    def _logits(self, layout: FoldedLayout) -> float:
        """Return the logits and their gradient."""
        tokens = layout.micro_batch * self.job.length / layout.cp
        vocab = -(-self.job.decoder.vocab_size // layout.tp)
        return self.logit_bytes * tokens * vocab


def _block_bytes(block: Block, job: TrainingJob, layout: FoldedLayout) -> _BlockBytes:
    modules = block_modules(block, job, layout)
    return _BlockBytes(
        modules=modules,
        total=sum(modules.values()),
        workspace=workspace_bytes(block, job, layout),
    )


def _kept(layout: FoldedLayout, job: TrainingJob) -> float:
    """Return the share of the activations that the device keeps, with the blocks in buffers."""
    share = offloaded_share(layout, job)
    if not share:
        return 1.0
    return min(1.0, 1 - share + min(1.0, BUFFERED_BLOCKS / job.decoder.num_layers))


def _shard(layout: FoldedLayout, dense: float, experts: float) -> float:
    """Return the parameters of one replica's shard."""
    return dense / (layout.dp * layout.cp) + experts / layout.edp
