"""Size of a model's chunks, and of their cache: Elixir's C_SIZE, solved.

Chunks hold the largest parameter, and are of the size that wastes the least. The cache holds what
the plan's memory counts of gathered blocks, and whatever one module needs at once.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moetune.domain.architecture import Block, Decoder
from moetune.domain.chunks import (
    FEWEST_PLACES,
    Chunk,
    ChunkGroup,
    Chunks,
    PackedParameter,
    pack,
    rounded_elements,
)
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.units import dtype_bytes
from moetune.solve.model.activations import WHOLE_BLOCKS
from moetune.solve.model.passes import projections_of

_LEAST_BYTES = 2**25
"""Least size of a chunk, the default of `moetune.shard`, from which on copies run near their best
rate."""
_NUM_SIZES = 48
_SPAN = 2
"""Sizes are tried up to this multiple of the smallest."""
_ALL_STATES = 3
"""ZeRO stage."""


class Module(NamedTuple):
    """One module that has parameters of its own, which it needs at once.

    Args:
        block: index of its block; None before the first and after the last block.
    """

    block: int | None
    parameters: tuple[PackedParameter, ...]


def chunks_of(job: TrainingJob, layout: FoldedLayout) -> Chunks | None:
    """Return the chunks that `moetune.shard` runs; None unless single ranks shard all states."""
    is_single = layout.tp * layout.cp * layout.pp == 1
    if layout.zero != _ALL_STATES or not is_single or job.decoder.predictions:
        return None
    modules = modules_of(job.decoder, layout, dtype=job.element)
    chunk_bytes, packed = _least_waste(
        [parameter for module in modules for parameter in module.parameters]
    )
    places = cache_places(modules, packed, chunk_bytes=chunk_bytes)
    return Chunks(
        chunk_bytes=chunk_bytes, cache_bytes=places * chunk_bytes, scatter=True,
        offload=layout.offload_optimizer > 0,
        num_parameters=int(job.decoder.parameters.total),
    )  # fmt: skip


def cache_places(modules: Sequence[Module], packed: Sequence[Chunk], *, chunk_bytes: int) -> int:
    """Return places for the two largest blocks, and for all chunks of any module."""
    chunk_of = {slot.name: number for number, chunk in enumerate(packed) for slot in chunk.slots}
    at_once = max(
        len({chunk_of[parameter.name] for parameter in module.parameters}) for module in modules
    )
    blocks: dict[int | None, int] = {}
    for module in modules:
        size = sum(
            parameter.num_elements * dtype_bytes(parameter.group.dtype)
            for parameter in module.parameters
        )
        blocks[module.block] = blocks.get(module.block, 0) + size
    largest = max(size for block, size in blocks.items() if block is not None)
    return max(FEWEST_PLACES, at_once, -(-WHOLE_BLOCKS * largest // chunk_bytes))


def modules_of(decoder: Decoder, layout: FoldedLayout, *, dtype: str) -> tuple[Module, ...]:
    """Return the modules in the order of their first use."""
    dense = ChunkGroup(dtype=dtype, ranks=layout.dp, label="dense")
    experts = ChunkGroup(dtype=dtype, ranks=layout.edp, label="experts")
    groups = dense, dense if layout.ep == 1 else experts
    width, table = decoder.d_model, decoder.vocab_size * decoder.d_model
    extra = decoder.embedding_extra + decoder.tables
    modules = [Module(block=None, parameters=_packed("embedding", dense, table, extra))]
    for number, block in enumerate(decoder.blocks):
        modules += _of_block(block, number, width, layout.ep, *groups)
    head = () if decoder.is_tied else _packed("head", dense, table)
    modules.append(Module(block=None, parameters=(*_packed("norm", dense, decoder.norms), *head)))
    return tuple(modules)


def _of_block(
    block: Block, number: int, width: int, ep: int, dense: ChunkGroup, experts: ChunkGroup
) -> Iterator[Module]:
    """Yield a block's modules: each matrix is one, and experts with their router are one."""
    sizes: list[int] = [block.norms]
    for part in block.parts:
        if isinstance(part, RoutedExperts):
            local = part.num_experts // ep
            up = local * part.d_expert * part.d_hidden * (part.num_gemms - 1)
            name = f"{number}.experts"
            yield Module(
                block=number,
                parameters=(
                    *_packed(f"{name}.router", dense, part.router.parameters),
                    *_packed(name, experts, up, local * part.d_expert * part.d_hidden),
                ),
            )
            sizes += [] if part.shared is None else _ffn(part.shared)
        elif isinstance(part, DenseFfn):
            sizes += _ffn(part)
        else:
            sizes += [rows * columns for _, rows, columns, _ in projections_of(part, width)]
    for place, size in enumerate(sizes):
        yield Module(block=number, parameters=_packed(f"{number}.{place}", dense, size))


def _ffn(part: DenseFfn) -> list[int]:
    matrix = part.d_model * part.d_hidden
    return [matrix * (part.num_gemms - 1), matrix]


def _packed(name: str, group: ChunkGroup, *sizes: int) -> tuple[PackedParameter, ...]:
    return tuple(
        PackedParameter(name=f"{name}.{place}", num_elements=size, group=group)
        for place, size in enumerate(sizes)
        if size
    )


def _least_waste(parameters: Sequence[PackedParameter]) -> tuple[int, tuple[Chunk, ...]]:
    """Return the size of chunk whose places are filled most, and the chunks."""
    widest = max((parameter.group for parameter in parameters), key=lambda group: group.ranks)
    item = dtype_bytes(widest.dtype)
    low = max(_LEAST_BYTES, max(parameter.num_elements for parameter in parameters) * item)
    sizes = {
        rounded_elements(widest, low + low * (_SPAN - 1) * step // _NUM_SIZES) * item
        for step in range(_NUM_SIZES + 1)
    }
    packs = [(size, pack(parameters, chunk_bytes=size)) for size in sorted(sizes)]
    return min(packs, key=lambda packing: _wasted_bytes(*packing))


def _wasted_bytes(chunk_bytes: int, chunks: Sequence[Chunk]) -> int:
    """Return the bytes of the chunks' places that no parameter fills."""
    moving = [chunk for chunk in chunks if not chunk.is_fused]
    item = dtype_bytes(chunks[0].group.dtype)
    used = sum(slot.num_elements for chunk in moving for slot in chunk.slots) * item
    return len(moving) * chunk_bytes - used
