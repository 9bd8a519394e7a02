"""States in shards, as `torch.distributed.checkpoint` saves them and loads them elsewhere."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from moetune.domain.errors import InputError
from moetune.runtime.chunked.optimizer import ChunkedOptimizer
from moetune.runtime.chunked.pieces import Piece, first_states
from moetune.runtime.chunked.state import buffers_of, model_chunks
from moetune.runtime.chunked.units import expert_layers

_GROUPS = "groups"


class Part(torch.Tensor):
    """A run of a flattened parameter's elements: torch's checkpoints ask it where it belongs.

    Attributes:
        first: place of its first element in the whole.
        num_elements: of the whole, the experts of all ranks together.
    """

    first: int
    num_elements: int

    def size(self, dim: int | None = None) -> Any:  # noqa: ANN401 - as torch
        """Return the whole's size: checkpoints compare it."""
        whole = torch.Size((self.num_elements,))
        return whole if dim is None else whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(
                offsets=torch.Size((self.first,)), sizes=torch.Size((self.numel(),))
            )
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.dtype),
                    size=torch.Size((self.num_elements,)),
                ),
            )
        ]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class ShardedStates:
    """A sharded model and its optimizer, for `torch.distributed.checkpoint.save` and `load`.

    A checkpoint loads at another number of ranks, with other chunks. Both are collectives.

        states = {"app": moetune.ShardedStates(model, optimizer)}
        torch.distributed.checkpoint.save(states, checkpoint_id=folder)

    Raises:
        InputError: the model or the optimizer is not sharded.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, ChunkedOptimizer):
            raise InputError(f"this {type(optimizer).__name__} is not sharded")
        self._model, self._optimizer = model, optimizer
        self._chunks = model_chunks(model)
        self._layers = expert_layers(model)
        self._sizes = {name: each.numel() for name, each in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's parts, by name; they share the memory of its shards."""
        self._chunks.settle()
        values = dict(self._values())
        states = dict(self._states())
        buffers = {f"buffer.{name}": buffer for name, buffer in buffers_of(self._model)}
        return {**values, **states, **buffers, _GROUPS: self._optimizer.settings}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was loaded into the parts."""
        for stored in self._chunks.stored:
            stored.publish()
        self._chunks.renew()
        self._optimizer.settings = state[_GROUPS]

    def _values(self) -> Iterator[tuple[str, Part]]:
        for stored in self._chunks.stored:
            for slot in stored.chunk.slots:
                low, high = stored.part_of(slot)
                if low < high:
                    values = stored.master[low - stored.low : high - stored.low]
                    yield f"model.{slot.name}", self._part(slot.name, values, low - slot.offset)

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in self._optimizer.pieces:
            for key, value in self._state_of(piece).items():
                name = f"optimizer.{piece.name}.{key}"
                yield name, self._part(piece.name, value, piece.first) if value.dim() else value

    def _state_of(self, piece: Piece) -> dict[str, torch.Tensor]:
        return first_states(self._optimizer, piece)

    def _part(self, name: str, values: torch.Tensor, first: int) -> Part:
        part = values.detach().as_subclass(Part)
        part.first, part.num_elements = first, self._sizes[name]
        if name in self._layers:
            link = self._layers[name].link
            part.first += link.rank * self._sizes[name]
            part.num_elements *= link.num_ranks
        return part
