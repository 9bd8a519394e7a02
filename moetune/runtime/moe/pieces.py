"""DTensors of which a rank has several pieces, as of a gate and an up-projection in one matrix.

torch's `_StridedShard` says where such pieces are, and gathers them in the right order, but torch's
checkpoints take a rank's part of any DTensor for one box of the whole. In state dicts these are of
a class that tells them all boxes. Memory is the parameter's own: nothing is copied.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive indices of a dimension that a rank has.

    Args:
        local: the first one's place in the rank's part.
        whole: and in the whole.
    """

    local: int
    whole: int
    length: int


class DTensorInPieces(DTensor):
    """A DTensor with the methods of torch's checkpoints for every box that a rank has of it."""

    @classmethod
    def of(cls, value: DTensor) -> "DTensorInPieces":
        """Return a DTensor as one of this class, in the same memory."""
        local, spec = value._local_tensor, value._spec  # noqa: SLF001 - torch has no public names
        return cls(local, spec, requires_grad=False)

    def plain(self) -> DTensor:
        """Return torch's own DTensor, in the same memory."""
        return DTensor(self._local_tensor, self._spec, requires_grad=False)

    # torch copies, stages and offloads state dicts by these four methods.

    def detach(self) -> "DTensorInPieces":
        """Return another such tensor in the same memory."""
        return self.of(cast("DTensor", super().detach()))

    def clone(self, **options: Any) -> "DTensorInPieces":  # noqa: ANN401 - as torch
        """Return a copy."""
        return self.of(cast("DTensor", super().clone(**options)))

    def new_empty(self, *args: Any, **options: Any) -> "DTensorInPieces":  # noqa: ANN401 - as torch
        """Return memory for another such tensor."""
        return self.of(cast("DTensor", super().new_empty(*args, **options)))

    def to(self, *args: Any, **options: Any) -> "DTensorInPieces":  # noqa: ANN401 - as torch
        """Return the tensor of another dtype or on another device."""
        return self.of(cast("DTensor", super().to(*args, **options)))

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as torch
        """Pickle torch's own DTensor, which `torch.load` knows."""
        return self.plain().__reduce_ex__(protocol)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=_offsets(box), sizes=torch.Size(run.length for run in box))
            for box in _boxes(self)
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        [box] = [each for each in _boxes(self) if _offsets(each) == index.offset]
        found = self._local_tensor
        for dim, run in enumerate(box):
            found = found.narrow(dim, run.local, run.length)
        return found


def _boxes(value: DTensor) -> list[tuple[Run, ...]]:
    """Return the boxes of the whole that this rank has, a run for each dimension."""
    return list(product(*(_runs(value, dim) for dim in range(value.dim()))))


def _offsets(box: tuple[Run, ...]) -> torch.Size:
    return torch.Size(run.whole for run in box)


def _runs(value: DTensor, dim: int) -> list[Run]:
    """Return this rank's runs of a dimension, in the order in which it has them."""
    indices = torch.arange(value.shape[dim], device="cpu")
    place = value.device_mesh.get_coordinate()
    assert place is not None  # noqa: S101 - this rank has a part
    for mesh_dim, placement in enumerate(value.placements):
        if getattr(placement, "dim", None) != dim:
            continue
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        ranks, mine = value.device_mesh.size(mesh_dim), place[mesh_dim]
        indices = torch.cat([part.chunk(ranks)[mine] for part in indices.chunk(factor)])
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    return [
        Run(local=start, whole=int(run[0]), length=len(run))
        for start, run in zip(starts, indices.tensor_split(breaks), strict=True)
    ]
