"""The state of a sharded model: whole state dicts, and sharded checkpoints for torch."""

from collections.abc import Callable, Iterator, Mapping
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
from moetune.runtime.replicas import expert_layers
from moetune.runtime.sharded.model_chunks import model_chunks
from moetune.runtime.sharded.optimizer import ChunkedOptimizer, first_states, parameter_shards

_GROUPS, _STATES = "groups", "the collection of states"


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state on the first rank's CPU, in master precision; {} elsewhere.

    Experts of a `MoELayer` are those of all its ranks, as in a layer on one rank. A collective: all
    ranks call it.

    Raises:
        InputError: the model is not sharded.
    """
    chunks = model_chunks(model)
    chunks.finish_reductions()
    layers = expert_layers(model)
    values: dict[str, torch.Tensor] = {}
    parameters = dict(model.named_parameters())
    for stored in chunks.stored:
        whole = stored.gather_whole(stored.master).cpu()
        for slot in stored.chunk.slots:
            shape = parameters[slot.name].shape
            value = whole[slot.offset : slot.offset + slot.num_elements].view(shape)
            if slot.name in layers:
                communicator = layers[slot.name].communicator
                parts = chunks.replicas.gather(value, _STATES)
                mine = torch.tensor([communicator.rank], device="cpu")
                ranks = chunks.replicas.gather(mine, _STATES)
                by_rank = {int(rank): part for rank, part in zip(ranks, parts, strict=True)}
                value = torch.cat([by_rank[rank] for rank in sorted(by_rank)]) if parts else value
            if chunks.replicas.rank == 0:
                values[slot.name] = value.clone()
    return _named(model, values) if chunks.replicas.rank == 0 else {}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load a state from `full_state_dict`; every rank gives the whole state.

    The numbers of ranks, of chunks and of experts on a rank may differ from the saved model's.

    Raises:
        InputError: the model is not sharded, or the state lacks a name or has another shape.
    """
    chunks = model_chunks(model)
    chunks.finish_reductions()
    for stored in chunks.stored:
        stored.make_writable()
    for name, part in _values(model):
        value, shape = _find(state, name), model.get_parameter(name).shape
        if value.numel() != part.num_elements or value.shape[1:] != shape[1:]:
            raise InputError(
                f"{name} has shape {tuple(value.shape)} in the state, not {tuple(shape)} a rank"
            )
        part.copy_(value.reshape(-1)[part.first : part.first + part.numel()])
    for stored in chunks.stored:
        stored.publish()
    chunks.invalidate()
    for name, buffer in buffers_of(model):
        buffer.copy_(_find(state, name))


def _find(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in state:
        raise InputError(f"the state has no {name}")
    return state[name]


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's persistent buffers by name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - as state_dict
                yield f"{prefix}.{name}".strip("."), buffer


def _named(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values under all names of `model.state_dict()`, buffers among them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state[name] = values[names[id(parameter)]]
    state |= {name: buffer.detach().cpu().clone() for name, buffer in buffers_of(model)}
    return state


class StatePart(torch.Tensor):
    """A slice of a flattened parameter or state, with the methods of torch's checkpoints.

    Attributes:
        first: index of its first element in the whole.
        num_elements: of the whole, for experts of all ranks.
    """

    first: int
    num_elements: int

    def size(self, dim: int | None = None) -> Any:  # noqa: ANN401 - as torch
        """Return the size of the whole, which checkpoints compare on loading."""
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
        self._chunks, self._part_of = model_chunks(model), _parts(model)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's slices by name; they share the memory of its shards."""
        self._chunks.finish_reductions()
        for stored in self._chunks.stored:
            stored.make_writable()
        values = {f"model.{name}": part for name, part in _values(self._model)}
        states = dict(self._states())
        buffers = {f"buffer.{name}": buffer for name, buffer in buffers_of(self._model)}
        return {**values, **states, **buffers, _GROUPS: self._optimizer.settings}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Publish the values that were loaded in place into the slices."""
        for stored in self._chunks.stored:
            stored.make_writable()
            stored.publish()
        self._chunks.invalidate()
        self._optimizer.settings = state[_GROUPS]

    def _states(self) -> Iterator[tuple[str, torch.Tensor]]:
        for shard in self._optimizer.shards:
            for key, value in first_states(self._optimizer, shard).items():
                name = f"optimizer.{shard.name}.{key}"
                yield name, self._part_of(shard.name, value, shard.first) if value.dim() else value


def _values(model: nn.Module) -> Iterator[tuple[str, StatePart]]:
    """Yield this rank's slices of all parameters, frozen ones too."""
    part_of = _parts(model)
    for shard in parameter_shards(model_chunks(model).stored, only_trainable=False):
        yield shard.name, part_of(shard.name, shard.values, shard.first)


def _parts(model: nn.Module) -> Callable[[str, torch.Tensor, int], StatePart]:
    """Return what makes a slice, by the parameter's name, from values and their first index."""
    layers = expert_layers(model)
    sizes = {name: each.numel() for name, each in model.named_parameters()}

    def part_of(name: str, values: torch.Tensor, first: int) -> StatePart:
        part = values.detach().as_subclass(StatePart)
        part.first, part.num_elements = first, sizes[name]
        if name in layers:
            communicator = layers[name].communicator
            part.first += communicator.rank * sizes[name]
            part.num_elements *= communicator.num_ranks
        return part

    return part_of
