"""Results of the search over layouts: candidates with their times, and layouts that do not fit."""

from dataclasses import dataclass

from moetune.domain.costs import Estimate
from moetune.domain.errors import ProfileError
from moetune.domain.layout import Layout
from moetune.domain.model_plan import ModelMemory
from moetune.solve.chunks.choose import ChunkChoice
from moetune.solve.layer.operations import NOTHING
from moetune.solve.model.prices import Priced
from moetune.solve.model.stages import PipelineTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Micro-batches of a step, recomputation, and the location of model states.

    Args:
        sequences: of a micro-batch.
        zero: optimizer states are sharded.
        recompute: blocks keep their input only.
        one_chunk: the MoE layer runs in one chunk; the buffers of more do not fit.
        chunked: model states are sharded in chunks that are gathered for their use.
        offload: the shards live on the host.
    """

    sequences: int
    num_micro_batches: int
    zero: bool
    recompute: bool
    one_chunk: bool = False
    chunked: bool = False
    offload: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that fits, with its time.

    Args:
        hops: send of one micro-batch from each stage to the next.
        gradients: exposed time of their reduction.
        accumulation: of the sums of the micro-batches' gradients.
        transfers: exposed time of chunks' transfers.
        chunks: chunks and cache of the model states; None where they are not in chunks.
    """

    layout: Layout
    setting: Batching
    priced: Priced
    pipeline: PipelineTime
    hops: tuple[Estimate, ...]
    gradients: Estimate
    optimizer: Estimate
    memory: ModelMemory
    transfers: Estimate = NOTHING
    accumulation: Estimate = NOTHING
    chunks: ChunkChoice | None = None

    @property
    def seconds(self) -> float:
        """The whole step."""
        after = self.accumulation.seconds + self.gradients.seconds + self.optimizer.seconds
        return self.pipeline.seconds + self.transfers.seconds + after

    @property
    def keeps_everything(self) -> bool:
        """Whether no recomputation, offload or repeated gather saves memory on the device."""
        chunks = self.chunks
        gathers_once = chunks is None or chunks.num_gathers <= chunks.num_chunks
        return gathers_once and not (self.setting.recompute or self.setting.offload)

    @property
    def order(self) -> tuple[float, int, bool, bool]:
        """Sort key of candidates: time, then the simpler one."""
        setting = self.setting
        return self.seconds, setting.sequences, setting.recompute, setting.zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """A layout that does not fit, in the setting with the least memory.

    Args:
        host_bytes: of offloaded states, where the host has less; else 0.
    """

    layout: Layout
    setting: Batching
    memory: ModelMemory
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Every layout that was tried, by outcome.

    Args:
        best: of each layout that fits, the fastest candidate; by time.
        unfit: each layout that does not fit; by memory.
        unpriced: each layout with an operation that was not measured, and what it lacks.
    """

    best: tuple[Candidate, ...]
    unfit: tuple[Unfit, ...]
    unpriced: tuple[tuple[Layout, ProfileError], ...]
