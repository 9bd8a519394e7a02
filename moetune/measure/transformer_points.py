"""Points of a whole model around its experts: attention, dense FFNs, head, optimizer."""

from collections.abc import Iterator, Sequence

from moetune.domain.cluster import DeviceKind, Group
from moetune.domain.model import Transformer
from moetune.domain.samples import (
    HOST_ROWS,
    HOST_WIDTH,
    AttentionPoint,
    Point,
    RowsPoint,
)
from moetune.domain.units import dtype_bytes
from moetune.measure.grid import Grid, collective, gemm_points

# The time of Adam, and of sums, over more elements is proportional to them.
_MAX_ADAM_ELEMENTS: dict[DeviceKind, int] = {"cpu": 2**24, "cuda": 2**28}
_MAX_HOST_ADAM_ELEMENTS = 2**26
_MAX_GRADIENT_LADDERS = 8


def transformer_points(
    model: Transformer,
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
        groups: that may all-reduce gradients.
        max_tokens: of the largest micro-batch; of others, the grid's fractions of it, in whole
            sequences.
    """
    heads, hidden = model.num_heads, model.moe.d_hidden
    widths = [
        size
        for size in (1, *group_sizes)
        if heads % size == 0 and hidden % size == 0 and size <= model.vocab_size
    ]
    sequences = _sequences(model, max_tokens, grid)
    for width in dict.fromkeys(widths):
        yield from _attention(model, dtype, heads // width, sequences)
        for rows in (count * model.length for count in sequences):
            yield from _block_gemms(model, dtype, width, rows)
            yield from _head(model, dtype, width, rows)
    for rows in (count * model.length for count in sequences):
        for op in ("norm", "norm_backward"):
            yield RowsPoint(op=op, dtype=dtype, rows=rows, width=model.moe.d_model)
    for op in ("dense_block",) if model.is_dense else ("dense_block", "moe_block"):
        for name in (op, f"{op}_step"):
            yield RowsPoint(op=name, dtype=dtype, rows=HOST_ROWS, width=HOST_WIDTH)
    yield from _optimizer(model, dtype, groups, kind, grid)


def _sequences(model: Transformer, max_tokens: int, grid: Grid) -> list[int]:
    """Return the sequences of each size of micro-batch, at least one."""
    most = max(max_tokens // model.length, 1)
    return list(dict.fromkeys(max(most // fraction, 1) for fraction in grid.fractions))


def _attention(
    model: Transformer, dtype: str, num_heads: int, sequences: Sequence[int]
) -> Iterator[Point]:
    for count in sequences:
        for backward in (False, True):
            yield AttentionPoint(
                dtype=dtype,
                num_sequences=count,
                length=model.length,
                num_heads=num_heads,
                head_dim=model.head_dim,
                backward=backward,
            )


def _block_gemms(model: Transformer, dtype: str, width: int, rows: int) -> Iterator[Point]:
    """Yield attention's projections and the two GEMMs of a dense FFN, on one of `width` ranks."""
    d_model, d_hidden = model.moe.d_model, model.moe.d_hidden
    for d_in, d_out in (
        (d_model, 3 * d_model // width),
        (d_model // width, d_model),
        (d_model, d_hidden // width),
        (d_hidden // width, d_model),
    ):
        yield from gemm_points(dtype, 1, rows, d_in, d_out)


def _head(model: Transformer, dtype: str, width: int, rows: int) -> Iterator[Point]:
    """Yield head and loss, on the one of `width` ranks with the most of the vocabulary."""
    vocab = model.vocab_per_rank(width)
    yield from gemm_points(dtype, 1, rows, model.moe.d_model, vocab)
    for op in ("cross_entropy", "cross_entropy_backward"):
        yield RowsPoint(op=op, dtype=dtype, rows=rows, width=vocab)


def _optimizer(
    model: Transformer, dtype: str, groups: Sequence[Group], kind: DeviceKind, grid: Grid
) -> Iterator[Point]:
    """Yield Adam and sums of all gradients and of shards of them, and their all-reduce."""
    parameters = model.num_parameters
    most = min(parameters, _MAX_ADAM_ELEMENTS[kind])
    for fraction in grid.fractions:
        for op in ("adam", "accumulate"):
            yield RowsPoint(op=op, dtype=dtype, rows=max(most // fraction, 1), width=1)
    if kind == "cuda":
        most = min(parameters, _MAX_HOST_ADAM_ELEMENTS)
        for fraction in grid.fractions:
            yield RowsPoint(op="host_adam", dtype=dtype, rows=max(most // fraction, 1), width=1)
    gradient_bytes = min(parameters * dtype_bytes(dtype), _MAX_GRADIENT_LADDERS * grid.max_bytes)
    for group in groups:
        if gradient_bytes > grid.max_bytes and group[0] > 1:
            yield collective("all_reduce", group, gradient_bytes)
