"""Bytes of a pipeline rank by part, and the room that a plan leaves for their errors."""

from collections.abc import Mapping
from dataclasses import dataclass

from moetune.domain.training_document import TrainingMemory

LIBRARY_BYTES = 1.5 * 2**30
"""CUDA context, cuBLAS and NCCL buffers outside the allocator; stated, not measured."""
ROUTING = "uneven routing"
"""The part with room for the rows of natural routing, if a job leaves such room."""
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
