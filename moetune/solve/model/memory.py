"""Memory of a pipeline rank, part by part.

The parts are device bytes at the peak of a training step with Megatron-Core's distributed
optimizer: bfloat16 parameters, gradients, states at the optimizer's bytes, activations of the
micro-batches in work, and libraries.

As in Megatron-Core and Transformer Engine, host memory may hold the activations of whole blocks, n
of L spread evenly. Each is copied out while the blocks behind it are computed, and copied back
before its backward pass. The host may also keep a share of the optimizer's states. It updates that
share after the device has updated the rest.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moetune.domain.once import Tables, once, once_for
from moetune.domain.optimizers import Optimizer
from moetune.domain.routing import BALANCED, NATURAL, ExpertLoads
from moetune.domain.targets import Target
from moetune.domain.training import HALF_PRECISION, FoldedLayout, Recompute, TrainingJob
from moetune.domain.training_document import TrainingMemory
from moetune.solve.model.activations import (
    ELEMENT,
    GEMM_INPUT,
    SHARDS_GRADIENTS,
    WHOLE_BLOCKS,
    block_modules,
    exchange_bytes,
    frozen_bytes,
    shard_of,
    state_bytes,
    workspace_bytes,
)
from moetune.solve.model.pipeline import DecoderStages, Parameters, RankBlocks, counted
from moetune.solve.model.schedule import most_live
from moetune.solve.model.trained import TrainedParameters

HOST_OPTIMIZER_BYTES = 18
"""Bytes that a host keeps for one parameter: master copy, two moments and the gradient in float32,
the parameter in bfloat16 (`HybridDeviceOptimizer`, with gradients and parameters in pinned
memory)."""
OPTIMIZER_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the optimizer in host memory that a search tries."""
BUFFERED_BLOCKS = 2
"""Offloaded blocks that are on the device at once: one is copied, the other computed."""
LIBRARY_BYTES = 1.5 * 2**30
"""CUDA context, cuBLAS and NCCL buffers outside the allocator; stated, not measured."""
_FULL_GRAPH = 0.2
"""Share of the tensors that a graph of the whole step reserves in addition: experts' rows up to a
bound, their stash, and a separate pool. The only published ablation has 225 against 187 GB for Hy3
on GB300 (yangwhale/gpu-tpu-pedia, 07f-gb300-hy3-295b-gke, A1 with and without the graph)."""
FRAGMENTATION = 0.03
"""Share of the tensors that the allocator reserves in addition at the peak: the median of seven
runs, 2.4 to 10.9 % (Megatron-Bridge@067f987, examples/model_verification_cards: gemma-4-26b-a4b-it,
nemotron-3.5-lightning)."""
ROUTING = "uneven routing"
"""The part with room for the rows of natural routing, if a job leaves such room."""
_PARTS = (
    "parameters", "gradients", "optimizer", "gathered", "activations", "workspace", "logits",
    "optimizer step", ROUTING, "fragmentation", "libraries",
)  # fmt: skip

_OF_RANKS = (
    "dp", "cp", "tp", "pp", "vpp", "ep", "etp", "micro_batch", "recompute", "schedule", "stages",
    "overlap",
)  # fmt: skip
"""Fields of a layout that its activations and parameters depend on."""


ERROR_SHARE = 0.09
"""Share by which predicted bytes may be too low: in nine of ten public runs the tensors took at
most 1.09 times the prediction for balanced routing (docs/results/public-runs.md)."""


def room_for_errors(peak_bytes: float, routing_bytes: float, error_share: float) -> float:
    """Return the bytes to leave free beyond the room for uneven routing, which serves both."""
    return max(0.0, error_share * (peak_bytes - routing_bytes) - routing_bytes)


def fillable_bytes(memory_bytes: int) -> int:
    """Return the bytes that a layout may take of a GPU, with a process's libraries added."""
    return memory_bytes + round(LIBRARY_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one pipeline rank's device, by part; they add up to `peak_bytes`.

    Args:
        activations: the part of that name by module, for all micro-batches in work.
        host_bytes: bytes in host memory, for one device.
    """

    rank: int
    parts: Mapping[str, float]
    activations: Mapping[str, float]
    host_bytes: float

    @property
    def peak_bytes(self) -> float:
        """The sum of all parts."""
        return sum(self.parts.values())


def is_tight(memory: RankMemory | TrainingMemory, limit_bytes: int) -> bool:
    """Return whether a rank's bytes fit, but not with room for errors of their number."""
    room = room_for_errors(memory.peak_bytes, memory.parts[ROUTING], ERROR_SHARE)
    return 0 <= limit_bytes - memory.peak_bytes < room


class BlockBytes(NamedTuple):
    """Bytes of a kind of block for one micro-batch: saved, and as workspace during computation."""

    modules: Mapping[str, float]
    total: float
    workspace: float

    def towards(self, fuller: "BlockBytes", share: float) -> "BlockBytes":
        """Return the bytes interpolated by `share` from an even block to the fullest rank's."""
        modules = {
            name: size + share * (fuller.modules[name] - size)
            for name, size in self.modules.items()
        }
        return BlockBytes(modules=modules, total=sum(modules.values()), workspace=fuller.workspace)


class _RankBytes(NamedTuple):
    """Blocks and bytes of a pipeline rank that do not depend on sharding or host memory.

    Args:
        live: micro-batches in work, in units of all the rank's blocks.
        held: parameters of the model on a device.
        trained: parameters with gradients, including adapters.
        activations, workspace, logits: bytes.
        uneven: bytes that natural routing adds to activations and workspace, if a job leaves room.
    """

    rank: int
    live: float
    held: Parameters
    trained: Parameters
    blocks: RankBlocks
    activations: float
    workspace: float
    logits: float
    uneven: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel(Tables):
    """Memory of a job's layouts.

    Args:
        error_share: share of predicted bytes that `needs` adds: `ERROR_SHARE`, or 0.
    """

    job: TrainingJob
    stages: DecoderStages
    target: Target
    error_share: float = 0.0

    @property
    @once(lambda: ())
    def trained(self) -> TrainedParameters:
        """Parameters that have gradients."""
        return TrainedParameters(self.stages, self.job.tuning, self.target)

    @property
    def _optimizer(self) -> Optimizer:
        return self.target.optimizer(self.job.optimizer)

    @property
    def _has_law(self) -> bool:
        """Whether a single law says how uneven the rows of every layer are."""
        return isinstance(self.job.routing, ExpertLoads) and self.job.routing != BALANCED

    @once(lambda routing: routing)
    def _routed(self, routing: ExpertLoads) -> "MemoryModel":
        """Return the memory model of the job with another routing."""
        return replace(self, job=replace(self.job, routing=routing, leaves_room=False))

    def peak(self, layout: FoldedLayout) -> RankMemory:
        """Return the memory of the fullest pipeline rank."""
        share = layout.offload_optimizer
        fullest = max(
            self._bytes_of_ranks(layout), key=lambda rank: sum(self._parts(layout, rank, share)[0])
        )
        return self._memory(layout, fullest)

    def needs(self, layout: FoldedLayout, *, on_host: float | None = None) -> tuple[float, float]:
        """Return the bytes of the fullest device and of its host, with a share `on_host` if given.

        The bytes of the device include the room for errors.
        """
        share = layout.offload_optimizer if on_host is None else on_host
        # The dispatcher matters only through HybridEP's buffers; the flag is part of the key.
        return self._needs(layout, share, layout.dispatcher == "hybrid_ep")

    @once_for(*_OF_RANKS, "zero", "cuda_graphs", "offload_activations", "offload_optimizer")
    def _needs(self, layout: FoldedLayout, on_host: float, *_: bool) -> tuple[float, float]:
        ranks = (self._parts(layout, rank, on_host) for rank in self._bytes_of_ranks(layout))
        routing = _PARTS.index(ROUTING)
        return max(
            (sum(parts) + room_for_errors(sum(parts), parts[routing], self.error_share), host)
            for parts, host in ranks
        )

    def least(self, layout: FoldedLayout, *, on_host: float) -> float:
        """Return a mean rank's bytes of states, a lower bound for the fullest device."""
        return self._least(layout, on_host)

    @once_for("dp", "cp", "tp", "pp", "ep", "etp", "zero")
    def _least(self, layout: FoldedLayout, on_host: float) -> float:
        whole = self.stages.whole
        held = self.stages.parameters(layout, whole).over(layout.pp)
        trained = self.trained.of_rank(layout, whole).over(layout.pp)
        states = self._states(layout, held, trained, on_host)
        return LIBRARY_BYTES + (1 + FRAGMENTATION) * sum(states)

    def states_of_blocks(self, layout: FoldedLayout, *, on_host: float) -> list[float]:
        """Return the bytes of states for one block of each kind, as `least` counts them."""
        blocks = zip(
            self.stages.parameters_of_blocks(layout), self.trained.of_blocks(layout), strict=True
        )
        states = [sum(self._states(layout, *block, on_host)) for block in blocks]
        return states[: len(self.job.decoder.kinds)]

    def of_rank(self, layout: FoldedLayout, rank: int) -> RankMemory:
        """Return the memory of a pipeline rank."""
        [blocks] = (blocks for blocks in self.stages.ranks(layout) if rank in blocks.ranks)
        alone = replace(blocks, ranks=(rank,))
        return self._memory(layout, self._bytes_of_rank(layout, alone, self.live(layout)))

    def _memory(self, layout: FoldedLayout, rank: _RankBytes) -> RankMemory:
        parts, host = self._parts(layout, rank, layout.offload_optimizer)
        share = self.device_share(layout)
        modules: dict[str, float] = {}
        for count, block in self._counted(layout, rank.blocks):
            for name, size in block.modules.items():
                modules[name] = modules.get(name, 0.0) + share * rank.live * count * size
        return RankMemory(
            rank=rank.rank,
            parts=dict(zip(_PARTS, parts, strict=True)),
            activations=modules,
            host_bytes=host,
        )

    def _parts(
        self, layout: FoldedLayout, rank: _RankBytes, on_host: float
    ) -> tuple[tuple[float, ...], float]:
        """Return the bytes of a rank's device by part, in the order of `_PARTS`, and its host's."""
        workspace, logits, trained = rank.workspace, rank.logits, rank.trained
        updated = shard_of(layout, *trained) if layout.zero else sum(trained)
        activations, host = rank.activations, 0.0
        if layout.offload_activations:
            host = layout.offloaded_share(self.job.decoder) * activations
            activations *= self.device_share(layout)
        states = self._states(layout, rank.held, trained, on_host)
        if self._optimizer.is_muon:
            states = (
                *states[:2],
                states[2] + self.trained.muon_bytes(layout, rank.blocks, self._optimizer),
            )
        host += on_host * HOST_OPTIMIZER_BYTES * updated
        copied = (1 - on_host) * self._optimizer.step_bytes * updated
        step = max(0.0, copied - activations - workspace - logits)
        tensors = *states, self._gathered(layout, rank), activations, workspace, logits, step
        uneven = rank.uneven * self.device_share(layout)
        lost = FRAGMENTATION + _FULL_GRAPH * (layout.cuda_graphs == "full")
        libraries = LIBRARY_BYTES + exchange_bytes(self.job, layout)
        return (*tensors, uneven, lost * sum(tensors), libraries), host

    def _states(
        self, layout: FoldedLayout, held: Parameters, trained: Parameters, on_host: float
    ) -> tuple[float, float, float]:
        """Return the bytes of parameters (with 8-bit weights), gradients and states.

        If narrow weights are cached between micro-batches, a weight has a copy for each pass.

        Args:
            held: parameters of the model, without adapters.
            trained: parameters that train, of the model or of adapters.
        """
        states = state_bytes(layout, self._optimizer, *trained, on_host=on_host)
        if not self.job.tuning.trains_all:
            frozen = frozen_bytes(self.job, layout, self._optimizer, held, trained)
            states = states[0] + frozen, *states[1:]
        if on_host and self.target.offloads_states:
            states = (1 - on_host) * states[0], (1 - on_host) * states[1], states[2]
        if self.job.dtype not in HALF_PRECISION and self.target.caches_narrow_weights:
            states = states[0] + 2 * GEMM_INPUT[self.job.dtype] * sum(held), *states[1:]
        return states

    def _gathered(self, layout: FoldedLayout, rank: _RankBytes) -> float:
        """Return the bytes gathered for a time: whole gradients, and under stage 3 parameters."""
        if layout.zero < SHARDS_GRADIENTS:
            return 0.0
        gathered, summed = self._largest_blocks(layout, rank.blocks)
        whole = self._optimizer.gradient_bytes * min(WHOLE_BLOCKS * summed, sum(rank.trained))
        if layout.zero > SHARDS_GRADIENTS:
            whole += ELEMENT * min(WHOLE_BLOCKS * gathered, sum(rank.held))
        return whole

    @once(lambda layout, rank: (layout.tp, layout.ep * layout.etp, _shards(layout), rank))
    def _largest_blocks(self, layout: FoldedLayout, rank: RankBlocks) -> tuple[float, float]:
        """Return the most parameters of any block on one device: held, and trained."""
        dense, experts = _shards(layout)
        kinds = self.stages.parameters_of_blocks(layout), self.trained.of_blocks(layout)
        held, trained = (
            max((dense * block.dense + experts * block.experts
                 for count, block in counted(rank, blocks) if count), default=0.0)
            for blocks in kinds
        )  # fmt: skip
        return held, trained

    @once_for(*_OF_RANKS)
    def _bytes_of_ranks(self, layout: FoldedLayout) -> tuple[_RankBytes, ...]:
        """Return the ranks' bytes that do not depend on sharding or host memory."""
        live = self.live(layout)
        return tuple(self._bytes_of_rank(layout, rank, live) for rank in self.stages.ranks(layout))

    def _bytes_of_rank(
        self, layout: FoldedLayout, rank: RankBlocks, live_by_rank: Sequence[float]
    ) -> _RankBytes:
        fullest = max(rank.ranks, key=live_by_rank.__getitem__)
        live = live_by_rank[fullest]
        activations, workspace = self.activations(layout, rank, live)
        uneven = 0.0
        if self.job.leaves_room:
            natural = self._routed(NATURAL).activations(layout, rank, live)
            uneven = sum(natural) - activations - workspace
        return _RankBytes(
            rank=fullest,
            live=live,
            held=self.stages.parameters(layout, rank),
            trained=self.trained.of_rank(layout, rank),
            blocks=rank,
            activations=activations,
            workspace=workspace,
            logits=self._logits(layout, rank),
            uneven=max(0.0, uneven),
        )

    def activations(
        self, layout: FoldedLayout, rank: RankBlocks, live: float
    ) -> tuple[float, float]:
        """Return the bytes of a rank's activations, and of its workspace."""
        blocks = self._counted(layout, rank)
        activations = live * sum(count * block.total for count, block in blocks)
        return activations, max((block.workspace for count, block in blocks if count), default=0.0)

    def _counted(self, layout: FoldedLayout, rank: RankBlocks) -> list[tuple[int, BlockBytes]]:
        """Return the number and the bytes of each kind of block, prediction blocks last.

        Each layer has another fullest rank. Over n layers the fullest rank exceeds the mean by its
        excess in a single layer over √n, like sums of independent loads.
        """
        blocks = counted(rank, self._bytes_of_blocks(layout, layout.recompute))
        if not self._has_law:
            return blocks
        num = sum(itertools.compress(rank.counts, self.job.decoder.routed_kinds))
        share = 1 / math.sqrt(max(1, num))
        even = self._routed(BALANCED)._counted(layout, rank)  # noqa: SLF001 - of another routing
        return [
            (count, block.towards(fuller, share))
            for (count, block), (_, fuller) in zip(even, blocks, strict=True)
        ]

    def device_share(self, layout: FoldedLayout) -> float:
        """Return the share of activations that a device keeps, including the buffered blocks."""
        share = layout.offloaded_share(self.job.decoder)
        if not share:
            return 1.0
        return min(1.0, 1 - share + min(1.0, BUFFERED_BLOCKS / self.job.decoder.num_layers))

    def live(self, layout: FoldedLayout) -> tuple[float, ...]:
        """Return the micro-batches in work on each rank, in units of all its blocks."""
        live = most_live(layout.order, layout.pp, layout.vpp, self.job.micro_batches(layout))
        if layout.overlap != "batch" or layout.pp == 1:
            return live
        return tuple(num + 1 / layout.vpp for num in live)  # warm-up has one more stage

    def sizes_of_blocks(
        self, layout: FoldedLayout, recomputes: Sequence[tuple[Recompute, ...]]
    ) -> list[list[BlockBytes]]:
        """Return the bytes of each kind of block with even rows, for each recomputation."""
        if self._has_law:
            return self._routed(BALANCED).sizes_of_blocks(layout, recomputes)
        num = len(self.job.decoder.kinds)
        return [self._bytes_of_blocks(layout, modules)[:num] for modules in recomputes]

    @once(
        lambda layout, recompute: (
            layout.tp, layout.cp, layout.ep, layout.etp, layout.micro_batch,
            recompute,
        )
    )  # fmt: skip
    def _bytes_of_blocks(
        self, layout: FoldedLayout, recompute: tuple[Recompute, ...]
    ) -> list[BlockBytes]:
        """Return the bytes of each kind of block, then of each multi-token prediction block."""
        able = layout if recompute == layout.recompute else replace(layout, recompute=recompute)
        blocks = []
        for place, kind in enumerate(self.job.decoder.kinds_and_predictions):
            modules = block_modules(kind, self.job, able, self.target)
            total = sum(modules.values())
            plain = self._bytes_of_blocks(layout, ())[place].total if recompute else total
            workspace = plain - total + workspace_bytes(kind, self.job, able)
            blocks.append(BlockBytes(modules=modules, total=total, workspace=workspace))
        return blocks

    def _logits(self, layout: FoldedLayout, rank: RankBlocks) -> float:
        """Return the bytes of a rank's logits at the loss, with gradients, for all its heads."""
        target, decoder = self.target, self.job.decoder
        tokens = layout.micro_batch * self.job.length / layout.cp
        padded = target.vocabulary_multiple * layout.tp
        sharers = layout.tp if target.splits_logits else 1
        vocab = -(-decoder.vocab_size // padded) * padded / sharers
        return rank.heads(decoder) * target.logit_bytes * tokens * vocab / target.loss_chunks


def _shards(layout: FoldedLayout) -> tuple[bool, bool]:
    """Return whether dense parameters, and whether experts, are sharded or on the host."""
    if layout.offload_optimizer and layout.zero > SHARDS_GRADIENTS:
        return True, True
    return layout.dp * layout.cp > 1, layout.edp > 1
