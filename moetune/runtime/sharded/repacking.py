"""Pack a model's chunks: at `shard`, and again in the order of first use after the first step."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moetune.domain.chunks import Chunk, Slot
from moetune.domain.errors import InputError
from moetune.runtime.sharded.layout import cache_capacity, pack_model
from moetune.runtime.sharded.optimizer import ChunkedOptimizer
from moetune.runtime.sharded.options import ShardOptions
from moetune.runtime.sharded.parameter_shards import parameter_shards, step_device
from moetune.runtime.sharded.placement import ChunkStats, Placement
from moetune.runtime.sharded.replicas import ReplicaGroup
from moetune.runtime.sharded.schedule import ParameterUses
from moetune.runtime.sharded.stored import StoredChunk

_MASTER, _GRADIENT = "master", "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBuilder:
    """Packs a model's parameters into chunks and allocates them on this rank.

    Args:
        parameters: by name, in the order of registration.
        replicas_of, labels: from `replica_groups`.
    """

    parameters: dict[str, nn.Parameter]
    replicas_of: Mapping[str, ReplicaGroup]
    labels: Mapping[str, str]
    options: ShardOptions
    placement: Placement
    stats: ChunkStats

    def pack(self, order: Iterable[str] = ()) -> tuple[Chunk, ...]:
        """Return the chunks of all parameters, those in `order` first.

        Raises:
            InputError: a parameter does not fit into a chunk.
        """
        names = dict.fromkeys((*order, *self.parameters))
        ordered = {name: self.parameters[name] for name in names}
        return pack_model(ordered, self.replicas_of, self.labels, self.options)

    def store(self, number: int, chunk: Chunk) -> StoredChunk:
        """Return an allocated chunk with the parameters' values."""
        replicas = self.replicas_of[chunk.slots[0].name]
        return StoredChunk(number, chunk, self.parameters, replicas, self.placement, self.stats)


@dataclass(frozen=True, slots=True)
class Repacking:
    """Packs a model again, once, between its first step and the second.

    Nothing changes for models that register their modules in the order of use, as most do.

    Args:
        replicas: the data-parallel ranks.
    """

    builder: ChunkBuilder
    replicas: ReplicaGroup

    def run(self, optimizer: ChunkedOptimizer, uses: ParameterUses) -> None:
        """Pack the parameters in the order of their first use and move all states; a collective."""
        known = _Agreed.gather(self.replicas, optimizer, uses.order)
        chunks = tuple(stored.chunk for stored in optimizer.chunks)
        packed = self.builder.pack(known.used)
        if packed == chunks or not self._all_fit(packed, uses.together):
            return
        move = _Move(self.builder, packed, optimizer, known)
        for stored in sorted(optimizer.chunks, key=lambda each: known.first_use(each.names)):
            move.take(stored)
        optimizer.replace_chunks(
            move.finish(), move.states, cache_capacity(packed, self.builder.options)
        )

    def _all_fit(self, chunks: Sequence[Chunk], together: Iterable[frozenset[str]]) -> bool:
        """Return whether chunks needed at the same time fit into the cache, on all ranks."""
        number_of = {
            slot.name: number
            for number, chunk in enumerate(chunks)
            if not chunk.is_fused
            for slot in chunk.slots
        }
        try:
            capacity = cache_capacity(chunks, self.builder.options)
        except InputError:
            capacity = 0
        needed = max(
            len({number_of[name] for name in names if name in number_of}) for names in together
        )
        return all(self.replicas.all_gather_text("fits" if needed <= capacity else ""))


@dataclass(frozen=True, slots=True)
class _Agreed:
    """Uses and states of parameters, equal on all ranks, before states are moved.

    Args:
        used: parameters in the order of their first use on the first rank.
        states: by parameter and name of the state; the value of scalars, None for tensors.
    """

    used: tuple[str, ...]
    states: Mapping[str, Mapping[str, float | None]]

    @classmethod
    def gather(
        cls, replicas: ReplicaGroup, optimizer: ChunkedOptimizer, used: tuple[str, ...]
    ) -> "_Agreed":
        states = {
            shard.name: {
                key: None if value.dim() else float(value)
                for key, value in optimizer.state[shard.values].items()
                if isinstance(value, torch.Tensor)
            }
            for shard in optimizer.shards
            if shard.values in optimizer.state
        }
        texts = [json.loads(text) for text in replicas.all_gather_text(json.dumps([used, states]))]
        merged = {name: keys for _, found in texts for name, keys in found.items()}
        return cls(tuple(texts[0][0]), merged)

    def first_use(self, names: Iterable[str]) -> int:
        """Return the place of the first of these parameters in the order of use."""
        numbers = {name: number for number, name in enumerate(self.used)}
        return min(numbers.get(name, len(numbers)) for name in names)

    def tensors(self, names: Iterable[str]) -> list[str]:
        """Return the names of these parameters' tensor states."""
        return sorted(
            {
                key
                for name in names
                for key, value in self.states.get(name, {}).items()
                if value is None
            }
        )


@dataclass(slots=True)
class _Move:
    """Fills new chunks from old ones, one old chunk after another.

    Args:
        chunks: the new ones; each is allocated with the first of its parameters, so that few
            chunks exist twice at a time.

    Attributes:
        states: of this rank's shards, by the parameter's name.
    """

    builder: ChunkBuilder
    chunks: Sequence[Chunk]
    optimizer: ChunkedOptimizer
    known: _Agreed
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    _stored: dict[int, StoredChunk] = field(default_factory=dict)

    def take(self, old: StoredChunk) -> None:
        """Move an old chunk's parameters into new chunks, and free it."""
        for key, whole in self._wholes(old):
            for slot in old.chunk.slots:
                self._put(slot.name, key, whole[slot.offset : slot.offset + slot.num_elements])
        old.retire()

    def finish(self) -> tuple[StoredChunk, ...]:
        """Return the new chunks, filled."""
        stored = tuple(self._stored[number] for number in range(len(self.chunks)))
        for each in stored:
            each.publish()
        groups = self.optimizer.group_of
        for shard in parameter_shards(stored):
            for key, value in self.known.states.get(shard.name, {}).items():
                if value is not None:
                    device = step_device(groups[shard.name], shard.values)
                    state = self.states.setdefault(shard.name, {})
                    state[key] = torch.tensor(value, device=device)
        return stored

    def _wholes(self, old: StoredChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a chunk's master, gradient and states, each whole on this rank's device."""
        yield _MASTER, old.gather_whole(old.master)
        if old.has_gradient and old.gradient is not None:
            yield _GRADIENT, old.gather_whole(old.gradient)
        for key in self.known.tensors(old.names):
            values = torch.zeros_like(old.master)
            for shard in self.optimizer.shards_in(old):
                state = self.optimizer.state.get(shard.values, {})
                if key in state:
                    values[shard.low : shard.high] = state.pop(key)
            yield key, old.gather_whole(values)

    def _put(self, name: str, key: str, whole: torch.Tensor) -> None:
        new, slot = self._place_of(name)
        low, high = new.own_range(slot)
        if key == _GRADIENT:
            new.add_gradient(low, whole[low - slot.offset : max(low, high) - slot.offset])
        elif low >= high:
            return
        elif key == _MASTER:
            new.master[low - new.low : high - new.low] = whole[
                low - slot.offset : high - slot.offset
            ]
        elif key in self.known.states.get(name, {}):
            part = torch.empty_like(new.master[low - new.low : high - new.low])
            part.copy_(whole[low - slot.offset : high - slot.offset])
            self.states.setdefault(name, {})[key] = part

    def _place_of(self, name: str) -> tuple[StoredChunk, Slot]:
        """Return a parameter's new chunk, allocated if it is not yet, and slot."""
        number, slot = next(
            (number, slot)
            for number, chunk in enumerate(self.chunks)
            for slot in chunk.slots
            if slot.name == name
        )
        if number not in self._stored:
            self._stored[number] = self._make(number)
        return self._stored[number], slot

    def _make(self, number: int) -> StoredChunk:
        chunk = self.chunks[number]
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - else reads fetch old chunks
            for slot in chunk.slots:
                parameter = self.builder.parameters[slot.name]
                # A placeholder without memory, until the values are moved.
                parameter.data = torch.zeros(
                    (), dtype=parameter.dtype, device=parameter.device
                ).expand(parameter.shape)
            return self.builder.store(number, chunk)
