"""Size of a model's chunks and of their cache: Elixir's C_SIZE, for chunks that are modules.

`moetune.shard` gathers whole modules: as many consecutive modules as fit into a chunk, and a
layer's experts separately. A chunk holds the largest module. The cache holds the gathered blocks
that the plan's memory counts.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from moetune.domain.architecture import Block, Decoder
from moetune.domain.chunks import FEWEST_PLACES, Chunks
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.units import dtype_bytes
from moetune.solve.model.activations import WHOLE_BLOCKS
from moetune.solve.model.passes import projections_of

_LEAST_BYTES = 2**25
"""Least size of a chunk and default of `moetune.shard`; from it on copies run near their best
rate."""
_WITH_BIASES = 65 / 64
"""Size of a matrix with biases over its size without; matrices are at least 64 wide."""
_ALL_STATES = 3
"""ZeRO stage that shards all states."""


class Module(NamedTuple):
    """A module with parameters, which it needs all at once.

    Args:
        block: index of its block; None before the first and after the last block.
    """

    block: int | None
    num_parameters: int


def chunks_of(job: TrainingJob, layout: FoldedLayout) -> Chunks | None:
    """Return the chunks that `moetune.shard` runs; None unless single ranks shard all states."""
    is_single = layout.tp * layout.cp * layout.pp == 1
    if layout.zero != _ALL_STATES or not is_single or job.decoder.predictions:
        return None
    modules, item = [*modules_of(job.decoder, layout)], dtype_bytes(job.element)
    most = max(module.num_parameters for module in modules)
    chunk_bytes = max(_LEAST_BYTES, math.ceil(item * most * _WITH_BIASES))
    blocks = Counter[int | None]()
    for module in modules:
        blocks[module.block] += item * module.num_parameters
    largest = max(size for block, size in blocks.items() if block is not None)
    places = max(FEWEST_PLACES, -(-WHOLE_BLOCKS * largest // chunk_bytes))
    return Chunks(
        chunk_bytes=chunk_bytes, cache_bytes=places * chunk_bytes, scatter=True,
        offload=layout.offload_optimizer > 0,
        num_parameters=int(job.decoder.parameters.total),
    )  # fmt: skip


def modules_of(decoder: Decoder, layout: FoldedLayout) -> Iterator[Module]:
    """Yield the modules in the order of their first use."""
    table = decoder.vocab_size * decoder.d_model
    yield Module(None, table + decoder.embedding_extra + decoder.tables)
    for number, block in enumerate(decoder.blocks):
        yield from (Module(number, size) for size in _of_block(block, decoder.d_model, layout.ep))
    yield Module(None, decoder.norms)
    if not decoder.is_tied:
        yield Module(None, table)


def _of_block(block: Block, width: int, ep: int) -> Iterator[int]:
    """Yield the sizes of a block's modules: norms, each matrix, router, a rank's experts."""
    yield block.norms
    for part in block.parts:
        if isinstance(part, RoutedExperts):
            yield part.router.parameters
            yield part.num_experts // ep * part.expert_parameters
            yield from () if part.shared is None else _ffn(part.shared)
        elif isinstance(part, DenseFfn):
            yield from _ffn(part)
        else:
            yield from (rows * columns for _, rows, columns, _ in projections_of(part, width))


def _ffn(part: DenseFfn) -> tuple[int, int]:
    matrix = part.d_model * part.d_hidden
    return matrix * (part.num_gemms - 1), matrix
