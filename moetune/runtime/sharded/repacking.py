"""Chunks packed anew in the order of first use, which the first step has shown."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moetune.domain.chunks import Chunk, Slot
from moetune.domain.errors import InputError
from moetune.runtime.sharded.layout import Placement, ShardOptions, num_places, pack_model
from moetune.runtime.sharded.optimizer import ChunkedOptimizer
from moetune.runtime.sharded.pieces import pieces_of
from moetune.runtime.sharded.schedule import Uses
from moetune.runtime.sharded.stored import StoredChunk
from moetune.runtime.sharded.streams import Ledger
from moetune.runtime.sharded.team import Team

_MASTER, _GRADIENT = "master", "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """Packs a model's parameters and stores their chunks.

    Args:
        parameters: by name, in the order of registration.
        teams, labels: as `teams_of` found them.
    """

    parameters: dict[str, nn.Parameter]
    teams: Mapping[str, Team]
    labels: Mapping[str, str]
    options: ShardOptions
    placement: Placement
    ledger: Ledger

    def pack(self, order: Iterable[str] = ()) -> tuple[Chunk, ...]:
        """Return the chunks with these parameters first.

        Raises:
            InputError: a parameter does not fit into a chunk.
        """
        names = dict.fromkeys((*order, *self.parameters))
        ordered = {name: self.parameters[name] for name in names}
        return pack_model(ordered, self.teams, self.labels, self.options)

    def store(self, number: int, chunk: Chunk) -> StoredChunk:
        """Return a chunk on this rank, with the parameters' values."""
        team = self.teams[chunk.slots[0].name]
        return StoredChunk(number, chunk, self.parameters, team, self.placement, self.ledger)


@dataclass(frozen=True, slots=True)
class Repacking:
    """Packs a model anew once, between its first step and the second.

    Usual models register their modules in the order in which they use them, and keep their
    chunks.

    Args:
        team: the data-parallel ranks.
    """

    packer: Packer
    team: Team

    def run(self, optimizer: ChunkedOptimizer, uses: Uses) -> None:
        """Pack the parameters in the order of their first use and move all states.

        A collective.
        """
        known = _Known.agreed(self.team, optimizer, uses.order)
        chunks = tuple(stored.chunk for stored in optimizer.chunks)
        packed = self.packer.pack(known.used)
        if packed == chunks or not self._all_fit(packed, uses.together):
            return
        move = _Move(self.packer, packed, optimizer, known)
        for stored in sorted(optimizer.chunks, key=lambda each: known.place(each.names)):
            move.take(stored)
        optimizer.adopt(move.finish(), move.states, num_places(packed, self.packer.options))

    def _all_fit(self, chunks: Sequence[Chunk], together: Iterable[frozenset[str]]) -> bool:
        """Whether what every rank needs together fits into its cache."""
        home = {
            slot.name: number
            for number, chunk in enumerate(chunks)
            if not chunk.is_fused
            for slot in chunk.slots
        }
        try:
            places = num_places(chunks, self.packer.options)
        except InputError:
            places = 0
        needed = max(len({home[name] for name in names if name in home}) for names in together)
        return all(self.team.texts("fits" if needed <= places else ""))


@dataclass(frozen=True, slots=True)
class _Known:
    """What all ranks know before they move states.

    Args:
        used: parameters in the order of their first use on the first rank.
        states: of every parameter with states: its names, with the value where it is a number.
    """

    used: tuple[str, ...]
    states: Mapping[str, Mapping[str, float | None]]

    @classmethod
    def agreed(cls, team: Team, optimizer: ChunkedOptimizer, used: tuple[str, ...]) -> "_Known":
        states = {
            piece.name: {
                key: None if value.dim() else float(value)
                for key, value in optimizer.state[piece.values].items()
                if isinstance(value, torch.Tensor)
            }
            for piece in optimizer.pieces
            if piece.values in optimizer.state
        }
        texts = [json.loads(text) for text in team.texts(json.dumps([used, states]))]
        merged = {name: keys for _, found in texts for name, keys in found.items()}
        return cls(tuple(texts[0][0]), merged)

    def place(self, names: Iterable[str]) -> int:
        """Return when the first of these parameters is used."""
        places = {name: place for place, name in enumerate(self.used)}
        return min(places.get(name, len(places)) for name in names)

    def tensors(self, names: Iterable[str]) -> list[str]:
        """Return the states of these parameters that have an element for each of theirs."""
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
        chunks: the new ones; each is made when the first of its parameters comes.

    Attributes:
        states: of this rank's part of every parameter.
    """

    packer: Packer
    chunks: Sequence[Chunk]
    optimizer: ChunkedOptimizer
    known: _Known
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    _stored: dict[int, StoredChunk] = field(default_factory=dict)

    def take(self, old: StoredChunk) -> None:
        """Move an old chunk's parameters into new chunks, and let go of it."""
        for key, whole in self._wholes(old):
            for slot in old.chunk.slots:
                self._put(slot.name, key, whole[slot.offset : slot.offset + slot.num_elements])
        old.retire()

    def finish(self) -> tuple[StoredChunk, ...]:
        """Return the new chunks, filled."""
        stored = tuple(self._stored[number] for number in range(len(self.chunks)))
        for each in stored:
            each.publish()
        for piece in pieces_of(stored):
            for key, value in self.known.states.get(piece.name, {}).items():
                if value is not None:
                    state = self.states.setdefault(piece.name, {})
                    state[key] = torch.tensor(value, device=piece.values.device)
        return stored

    def _wholes(self, old: StoredChunk) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a chunk's masters, gradients and states, each whole on this rank's device."""
        yield _MASTER, old.whole_of(old.master)
        if old.has_gradient and old.gradient is not None:
            yield _GRADIENT, old.whole_of(old.gradient)
        for key in self.known.tensors(old.names):
            values = torch.zeros_like(old.master)
            for piece in self.optimizer.pieces_in(old):
                state = self.optimizer.state.get(piece.values, {})
                if key in state:
                    values[piece.low : piece.high] = state.pop(key)
            yield key, old.whole_of(values)

    def _put(self, name: str, key: str, whole: torch.Tensor) -> None:
        new, slot = self._home(name)
        low, high = new.part_of(slot)
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

    def _home(self, name: str) -> tuple[StoredChunk, Slot]:
        """Return the new chunk of a parameter, made now if it is the first, and the slot."""
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
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - else parameters ask the old chunks
            for slot in chunk.slots:
                parameter = self.packer.parameters[slot.name]
                # Values come later; these take no memory.
                parameter.data = torch.zeros(()).to(parameter).expand(parameter.shape)
            return self.packer.store(number, chunk)
