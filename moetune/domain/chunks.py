"""Chunks of model states: parameters packed in the order of a training step's uses (Elixir)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from moetune.domain.errors import InputError
from moetune.domain.units import dtype_bytes, format_bytes

FEWEST_PLACES = 2
"""Chunks that a cache has room for at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Model states in chunks (Elixir)."""

    chunk_bytes: int
    cache_bytes: int
    scatter: bool
    offload: bool
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One module's need for chunks, at its forward or its backward.

    An order is the uses of one training step, forward then backward.

    Args:
        chunks: indices into the packed chunks; fused ones never appear.
        leaves: chunks that are reduced after this use and leave the cache.
    """

    chunks: tuple[int, ...]
    leaves: tuple[int, ...] = ()


ALIGNMENT_BYTES = 64
"""Every parameter begins at a multiple of it: vector loads and grouped GEMMs need 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Properties that all parameters of one chunk share.

    Args:
        ranks: number of ranks with replicas of them, over which the chunk's states are sharded.
        label: distinguishes groups of equally many ranks.
    """

    dtype: str
    ranks: int
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedParameter:
    """A parameter to pack into a chunk."""

    name: str
    num_elements: int
    group: ChunkGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A parameter's place in its chunk, in elements."""

    name: str
    offset: int
    num_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Parameters that travel together.

    Args:
        num_elements: its capacity; divides by the group's ranks.
        is_fused: it holds a group that is smaller than one chunk, and is always resident.
    """

    group: ChunkGroup
    num_elements: int
    slots: tuple[Slot, ...]
    is_fused: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole chunk in its parameters' dtype."""
        return self.num_elements * dtype_bytes(self.group.dtype)


def pack(parameters: Iterable[PackedParameter], *, chunk_bytes: int) -> tuple[Chunk, ...]:
    """Pack every group's parameters, in their order, into chunks of up to `chunk_bytes`.

    No parameter straddles two chunks. A chunk ends behind its last parameter: its place in the
    cache has `chunk_bytes`, but only the filled part travels (whole places were 28 % padding for a
    GPT-like model). A group smaller than a chunk becomes one fused chunk. Chunks come in the order
    of their first parameters.

    Args:
        parameters: in the order of their first use.
        chunk_bytes: largest size of a chunk, rounded up so that a group's ranks share it evenly.

    Raises:
        InputError: a parameter is larger than a chunk.
    """
    groups: dict[ChunkGroup, list[PackedParameter]] = {}
    place: dict[str, int] = {}
    for number, parameter in enumerate(parameters):
        groups.setdefault(parameter.group, []).append(parameter)
        place[parameter.name] = number
    chunks = (
        chunk
        for group, members in groups.items()
        for chunk in _pack_group(group, members, chunk_bytes)
    )
    return tuple(sorted(chunks, key=lambda chunk: place[chunk.slots[0].name]))


def rounded_elements(group: ChunkGroup, num_bytes: int) -> int:
    """Return the elements of a chunk of at least so many bytes, with shards that stay aligned."""
    grain = ALIGNMENT_BYTES // dtype_bytes(group.dtype) * group.ranks
    elements = -(-num_bytes // dtype_bytes(group.dtype))
    return -(-elements // grain) * grain


def _pack_group(
    group: ChunkGroup, members: Sequence[PackedParameter], chunk_bytes: int
) -> list[Chunk]:
    capacity = rounded_elements(group, chunk_bytes)
    places = _places(group, members, capacity)
    runs = [
        tuple(slot for _, slot in slots) for _, slots in groupby(places, key=lambda place: place[0])
    ]
    used = sum(slot.num_elements for slot in runs[0]) * dtype_bytes(group.dtype)
    is_fused = len(runs) == 1 and used < chunk_bytes
    item, ends = dtype_bytes(group.dtype), (run[-1].offset + run[-1].num_elements for run in runs)
    return [
        Chunk(
            group=group, num_elements=rounded_elements(group, end * item), slots=slots,
            is_fused=is_fused,
        )
        for slots, end in zip(runs, ends, strict=True)
    ]  # fmt: skip


def _places(
    group: ChunkGroup, members: Sequence[PackedParameter], capacity: int
) -> list[tuple[int, Slot]]:
    """Return (number of the chunk, slot) of every parameter."""
    grain = ALIGNMENT_BYTES // dtype_bytes(group.dtype)
    places: list[tuple[int, Slot]] = []
    number = offset = 0
    for parameter in members:
        if parameter.num_elements > capacity:
            num_bytes = parameter.num_elements * dtype_bytes(group.dtype)
            raise InputError(
                f"{parameter.name} needs {format_bytes(num_bytes)}, but a chunk has "
                f"{format_bytes(capacity * dtype_bytes(group.dtype))}",
                f"use chunks of at least {num_bytes} bytes",
            )
        size = parameter.num_elements
        if offset + size > capacity:
            number, offset = number + 1, 0
        places.append((number, Slot(name=parameter.name, offset=offset, num_elements=size)))
        offset += -(-size // grain) * grain
    return places
