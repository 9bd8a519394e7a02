"""Memory of a pipeline rank, part by part.

Bytes of the device that a training step takes at its peak with Megatron-Core's distributed
optimizer: bfloat16 parameters, gradients added up in float32, Adam's moments and the master copy in
float32, activations of the micro-batches in work, and what the libraries take.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.solve.training.activations import ELEMENT, FULL, block_bytes, workspace_bytes
from moetune.solve.training.stages import StageBlocks, cut, live_micro_batches, of_rank
from moetune.solve.training.step import parameters_of_rank

_OPTIMIZER_BYTES = 12
"""Two moments and the master copy, float32 each."""
_GIB = 2**30
LIBRARY_BYTES = 1.5 * _GIB
"""CUDA context, cuBLAS and NCCL buffers outside the allocator; stated, not measured."""
FRAGMENTATION = 0.05
"""Share of the activations that an allocator with expandable segments loses; stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one pipeline rank's device, by part; they add up to `peak_bytes`."""

    rank: int
    parts: Mapping[str, float]

    @property
    def peak_bytes(self) -> float:
        """The sum."""
        return sum(self.parts.values())


def rank_memory(
    job: TrainingJob, layout: FoldedLayout, rank: int, *, skew: float = 1.0
) -> RankMemory:
    """Return the memory of a pipeline rank."""
    dense, experts = parameters_of_rank(job, layout, rank)
    data, replicas = layout.dp * layout.cp, layout.edp
    count = dense + experts
    shard = dense / data + experts / replicas
    states, gradients, parameters = (
        shard if layout.zero >= stage else count for stage in (1, 2, 3)
    )
    stages = of_rank(cut(job.decoder, layout.num_stages), rank, layout.pp)
    activations, workspace = _activations(job, layout, rank, stages, skew)
    parts = {
        "parameters": ELEMENT * parameters,
        "gradients": FULL * gradients,
        "optimizer": _OPTIMIZER_BYTES * states,
        "activations": activations,
        "workspace": workspace,
        "logits": _logits(job, layout) if stages[-1].has_head else 0.0,
        "fragmentation": FRAGMENTATION * (activations + workspace),
        "libraries": LIBRARY_BYTES,
    }
    return RankMemory(rank=rank, parts=parts)


def peak_memory(job: TrainingJob, layout: FoldedLayout, *, skew: float = 1.0) -> RankMemory:
    """Return the memory of the pipeline rank that has most."""
    ranks = {0, layout.pp - 1, min(1, layout.pp - 1)}
    found = (rank_memory(job, layout, rank, skew=skew) for rank in sorted(ranks))
    return max(found, key=lambda one: one.peak_bytes)


def _activations(
    job: TrainingJob,
    layout: FoldedLayout,
    rank: int,
    stages: tuple[StageBlocks, ...],
    skew: float,
) -> tuple[float, float]:
    """Return the bytes of the micro-batches in work, and those of the block being computed."""
    kinds = job.decoder.kinds
    each = [block_bytes(kind, job, layout, skew=skew) for kind in kinds]
    own = sum(
        count * size
        for stage in stages
        for count, size in zip(stage.counts, each, strict=True)
    )
    batches = job.global_batch // (layout.micro_batch * layout.dp)
    live = live_micro_batches(
        rank=rank, pp=layout.pp, vpp=layout.vpp, num_micro_batches=batches
    )
    if layout.overlap == "batch":
        live += 1 / layout.vpp
    present = [
        kind
        for index, kind in enumerate(kinds)
        if any(stage.counts[index] for stage in stages)
    ]
    workspace = max(workspace_bytes(kind, job, layout, skew=skew) for kind in present)
    return live * own, workspace


def _logits(job: TrainingJob, layout: FoldedLayout) -> float:
    """Return the logits in bfloat16, and in float32 with their gradient while the loss is taken."""
    tokens = layout.micro_batch * job.length / layout.cp
    vocab = -(-job.decoder.vocab_size // layout.tp)
    return (ELEMENT + 2 * FULL) * tokens * vocab
