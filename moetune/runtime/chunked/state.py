"""What a sharded model holds, and its whole state in one place."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from moetune.domain.chunk_order import Use
from moetune.domain.chunking import Chunk
from moetune.domain.errors import InputError
from moetune.runtime.chunked.keeper import ChunkKeeper
from moetune.runtime.chunked.stored import StoredChunk
from moetune.runtime.chunked.team import Team
from moetune.runtime.chunked.traffic import Ledger, Traffic
from moetune.runtime.chunked.units import expert_layers

_ATTRIBUTE = "_moetune_chunks"


class ModelChunks:
    """The chunks of a sharded model, to look at."""

    def __init__(self, model: nn.Module, keeper: ChunkKeeper, ledger: Ledger, team: Team) -> None:
        self._model, self._keeper, self._ledger, self.team = model, keeper, ledger, team

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Which parameters every chunk has."""
        return tuple(stored.chunk for stored in self._keeper.chunks)

    @property
    def stored(self) -> tuple[StoredChunk, ...]:
        """The states of every chunk on this rank."""
        return tuple(self._keeper.chunks)

    @property
    def order(self) -> tuple[Use, ...]:
        """The uses of the last whole training step; empty before the second one begins."""
        return self._keeper.cache.order

    @property
    def num_places(self) -> int:
        """Whole chunks that the cache may hold."""
        return self._keeper.cache.places

    @property
    def traffic(self) -> Traffic:
        """Transfers since the model was sharded."""
        return self._ledger.traffic

    @property
    def peak_cache_bytes(self) -> int:
        """Most bytes of whole chunks at once in the cache."""
        return self._ledger.peak_cache_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Most bytes of chunks, shards and gradients at once on the device."""
        return self._ledger.peak_device_bytes

    def settle(self) -> None:
        """Wait for everything under way."""
        self._keeper.settle()

    def renew(self) -> None:
        """Let go of cached values, because the shards have others."""
        self._keeper.renew()


def attach(model: nn.Module, chunks: ModelChunks) -> None:
    """Let `model_chunks` find the chunks of a model."""
    object.__setattr__(model, _ATTRIBUTE, chunks)
    model.register_state_dict_pre_hook(_refuse)
    model.register_load_state_dict_pre_hook(_refuse)


def _refuse(module: nn.Module, *_: object) -> None:
    raise InputError(
        f"the parameters of this {type(module).__name__} are in shards",
        "use moetune.full_state_dict and moetune.load_full_state_dict",
    )


def model_chunks(model: nn.Module) -> ModelChunks:
    """Return the chunks of a sharded model.

    Raises:
        InputError: it is not sharded.
    """
    found = getattr(model, _ATTRIBUTE, None)
    if not isinstance(found, ModelChunks):
        raise InputError(f"this {type(model).__name__} is not sharded", "call moetune.shard first")
    return found


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state on the first rank's CPU, in master precision; {} elsewhere.

    Experts of a `MoELayer` come whole, those of all its ranks one after another, as in a layer
    on one rank. A collective: all ranks call it.

    Raises:
        InputError: the model is not sharded.
    """
    chunks = model_chunks(model)
    chunks.settle()
    layers = expert_layers(model)
    values: dict[str, torch.Tensor] = {}
    parameters = dict(model.named_parameters())
    for stored in chunks.stored:
        whole = stored.whole_of(stored.master).cpu()
        for slot in stored.chunk.slots:
            shape = parameters[slot.name].shape
            value = whole[slot.offset : slot.offset + slot.num_elements].view(shape)
            if slot.name in layers:
                link = layers[slot.name].link
                parts = chunks.team.collect(value)
                places = chunks.team.collect(torch.tensor([link.rank]))
                by_rank = {int(rank): part for rank, part in zip(places, parts, strict=True)}
                value = torch.cat([by_rank[rank] for rank in sorted(by_rank)]) if parts else value
            if chunks.team.rank == 0:
                values[slot.name] = value.clone()
    return _named(model, values) if chunks.team.rank == 0 else {}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load what `full_state_dict` returned; every rank gives the whole state.

    The number of ranks, chunks and experts of a rank may be others than those that saved it.

    Raises:
        InputError: the model is not sharded, or the state lacks a name or has another shape.
    """
    chunks = model_chunks(model)
    chunks.settle()
    layers = expert_layers(model)
    parameters = dict(model.named_parameters())
    for stored in chunks.stored:
        for slot in stored.chunk.slots:
            value = _find(state, slot.name)
            shape = parameters[slot.name].shape
            if slot.name in layers:
                link = layers[slot.name].link
                value = value[link.rank * shape[0] : (link.rank + 1) * shape[0]]
            if value.shape != shape:
                raise InputError(
                    f"{slot.name} has shape {tuple(value.shape)} in the state, not {tuple(shape)}"
                )
            low, high = stored.part_of(slot)
            if low < high:
                into = stored.master[low - stored.low : high - stored.low]
                into.copy_(value.reshape(-1)[low - slot.offset : high - slot.offset])
        stored.publish()
    chunks.renew()
    for name, buffer in buffers_of(model):
        buffer.copy_(_find(state, name))


def _find(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in state:
        raise InputError(f"the state has no {name}")
    return state[name]


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a state has beside parameters."""
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
