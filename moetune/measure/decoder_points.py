"""Points of a whole model around its experts: attention, projections, dense FFNs, head, optimizer.

What plans of trainings ask for, at every tensor-parallel width that divides the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.architecture import Block, Decoder
from moetune.domain.attention import GroupedQueryAttention
from moetune.domain.cluster import DeviceKind, Group
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.samples import AttentionPoint, CollectiveOp, Point, RowsPoint
from moetune.domain.units import dtype_bytes
from moetune.measure.grid import Grid, adam_elements, collective, gemm_points
from moetune.solve.model.passes import projections_of

_MAX_GRADIENT_LADDERS = 8
_OF_GRADIENTS: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A whole model to measure for.

    Args:
        length: tokens of a sequence.
    """

    decoder: Decoder
    length: int


def decoder_points(
    model: MeasuredModel,
    *,
    dtype: str,
    group_sizes: Sequence[int],
    groups: Sequence[Group],
    max_tokens: int,
    kind: DeviceKind,
    grid: Grid,
) -> Iterator[Point]:
    """Yield the points of one micro-batch at every tensor-parallel width that divides the model.

    Args:
        group_sizes: ranks of a tensor-parallel group, in addition to one.
        groups: that may reduce gradients and gather parameters.
        max_tokens: of the largest micro-batch; of others, the grid's fractions of it, in whole
            sequences.
    """
    decoder = model.decoder
    sequences = _sequences(model.length, max_tokens, grid)
    for width in dict.fromkeys((1, *group_sizes)):
        if any(count % width for count in decoder.head_counts):
            continue
        vocab = -(-decoder.vocab_size // width)
        for count in sequences:
            rows = count * model.length
            for block in decoder.kinds:
                for d_in, d_out in _shapes(block, decoder.d_model, width):
                    yield from gemm_points(dtype, 1, rows, d_in, d_out)
                yield from _attention(block, dtype, width, count, model.length)
            yield from gemm_points(dtype, 1, rows, decoder.d_model, vocab)
    yield from _optimizer(decoder, dtype, groups, kind, grid)


def _sequences(length: int, max_tokens: int, grid: Grid) -> list[int]:
    """Return the sequences of each size of micro-batch, at least one."""
    most = max(max_tokens // length, 1)
    return list(dict.fromkeys(max(most // fraction, 1) for fraction in grid.fractions))


def _shapes(block: Block, d_model: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield inputs and outputs of the GEMMs around the experts, on one of `width` ranks."""
    for part in block.parts:
        if isinstance(part, RoutedExperts):
            yield part.d_model, part.num_experts
            if part.shared is not None:
                yield from _ffn(part.shared, width)
        elif isinstance(part, DenseFfn):
            yield from _ffn(part, width)
        else:
            for _, d_in, d_out, is_cut in projections_of(part, d_model):
                yield d_in, max(1, d_out // width) if is_cut else d_out


def _ffn(part: DenseFfn, width: int) -> Iterator[tuple[int, int]]:
    hidden = max(1, part.d_hidden // width)
    yield part.d_model, hidden * (part.num_gemms - 1)
    yield hidden, part.d_model


def _attention(
    block: Block, dtype: str, width: int, num_sequences: int, length: int
) -> Iterator[Point]:
    for part in block.parts:
        if isinstance(part, GroupedQueryAttention) and part.is_full:
            for backward in (False, True):
                yield AttentionPoint(
                    dtype=dtype, num_sequences=num_sequences, length=length,
                    num_heads=part.num_heads // width, head_dim=part.head_dim, backward=backward,
                )  # fmt: skip


def _optimizer(
    decoder: Decoder, dtype: str, groups: Sequence[Group], kind: DeviceKind, grid: Grid
) -> Iterator[Point]:
    """Yield Adam on all parameters and on shards of them, and collectives of all gradients."""
    parameters = int(decoder.parameters.total)
    for op, largest in adam_elements(kind).items():
        for fraction in grid.fractions:
            rows = max(min(parameters, largest) // fraction, 1)
            yield RowsPoint(op=op, dtype=dtype, rows=rows, width=1)
    gradient_bytes = min(parameters * dtype_bytes(dtype), _MAX_GRADIENT_LADDERS * grid.max_bytes)
    for group in groups:
        if gradient_bytes > grid.max_bytes and group[0] > 1:
            for name in _OF_GRADIENTS:
                shards = group[0] if name == "all_gather" else 1
                yield collective(name, group, gradient_bytes // shards)
