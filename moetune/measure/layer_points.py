"""Points for layers, and for whole models around their experts.

A layer has the GEMMs, exchanges and memory-bound operations of its chunks. A model has attention,
projections, dense FFNs, head and optimizer, at every tensor-parallel width that divides them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from moetune.domain.architecture import Block, Decoder
from moetune.domain.attention import GroupedQueryAttention
from moetune.domain.cluster import DeviceKind, Group
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.kernels import ExpertKernel
from moetune.domain.layer import Workload
from moetune.domain.samples import (
    ALONE_CHUNKS,
    HOST_CHUNKS,
    LAUNCHES,
    AttentionPoint,
    CollectiveOp,
    CollectivePoint,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
    StepPoint,
    uneven_form,
)
from moetune.domain.units import dtype_bytes
from moetune.measure.grid import (
    IN_FLIGHT,
    STAGED,
    Grid,
    adam_elements,
    collective,
    gemm_points,
    rows_points,
)
from moetune.solve.model.passes import projections_of

KernelsOf = Callable[[Workload], Sequence[ExpertKernel]]
_GROUPED_DTYPE = "bfloat16"
"""The dtype of kernels that multiply all experts at once."""
_FEW_TOKENS = 16
"""The divisor of the tokens for which a lone exchange is measured, too."""
_STEP_DEGREES: Mapping[int, tuple[int, ...]] = MappingProxyType({1: (1, 4, 16), 4: (1, 4)})
"""The numbers of chunks whose whole steps are measured, by the divisor of the tokens."""


def layer_points(
    workloads: Sequence[Workload], groups: Sequence[Group], grid: Grid
) -> Iterator[Point]:
    """Yield points of every layer's computation and exchanges, in the grid's numbers of chunks."""
    for load in workloads:
        for degree in grid.degrees:
            yield from _gemms(load, degree)
        for group in groups:
            if group[0] == load.world_size:
                yield from _exchanges(load, group, grid)
        for degree in grid.degrees[::2]:
            rows, tokens = max(load.rows // degree, 1), max(load.tokens_per_rank // degree, 1)
            yield from rows_points(load.layer, load.dtype, rows=rows, tokens=tokens)


def _gemms(load: Workload, degree: int) -> Iterator[GemmPoint]:
    """Yield the GEMMs of a layer's experts for one of `degree` chunks, with even loads."""
    shape = (load.layer.d_model, load.layer.d_hidden)
    rows = -(-load.rows // (degree * load.local_experts))
    for d_in, d_out in (shape, shape[::-1]):
        yield from gemm_points(load.dtype, load.local_experts, rows, d_in, d_out)


def uneven_points(workloads: Sequence[Workload], grid: Grid) -> Iterator[Point]:
    """Yield the GEMMs of layers in which a single expert of a rank has most of the rows.

    A grouped kernel is then slower; a kernel per expert takes the same time as with even loads.
    """
    for load in workloads:
        if load.local_experts == 1 or load.dtype != _GROUPED_DTYPE:
            continue
        for degree in grid.degrees[::2]:
            for even in _gemms(load, degree):
                yield replace(even, product=uneven_form(even.product))


def kernel_points(
    workloads: Sequence[Workload], grid: Grid, kernels_of: KernelsOf
) -> Iterator[Point]:
    """Yield the GEMMs of layers with the other kernels, for every second number of chunks.

    Args:
        kernels_of: returns the kernels that can run a layer's experts, except the default.
    """
    for load in workloads:
        for kernel in kernels_of(load):
            # A loop is another kernel only on GPUs, where it may be worth it only with one chunk.
            for degree in grid.degrees[: 1 if kernel == "loop" else None : 2]:
                for point in _gemms(load, degree):
                    yield replace(point, kernel=kernel)


def launch_points(workloads: Sequence[Workload]) -> Iterator[Point]:
    """Yield layers in few and many chunks, so small that the host's launches take all the time."""
    for dtype in {load.dtype: None for load in workloads}:
        for op in LAUNCHES:
            for chunks in HOST_CHUNKS:
                yield RowsPoint(op=op, dtype=dtype, rows=chunks, width=1)


def gate_points(workloads: Sequence[Workload], grid: Grid) -> Iterator[Point]:
    """Yield the GEMMs of layers' gates: a single matrix whose width is the number of experts.

    Interpolation among the experts' GEMMs has neither so narrow a matrix nor so many rows.
    """
    for load in workloads:
        for degree in grid.degrees[::2]:
            rows = max(load.tokens_per_rank // degree, 1)
            yield from gemm_points(load.dtype, 1, rows, load.layer.d_model, load.layer.num_experts)


def _exchanges(load: Workload, group: Group, grid: Grid) -> Iterator[Point]:
    """Yield all-to-alls of the rows in chunks, alone and several in flight."""
    for degree in (*range(1, ALONE_CHUNKS + 1), _FEW_TOKENS):
        yield collective("all_to_all", group, load.payload_bytes // degree)
    for degree in grid.queued_degrees:
        yield collective("all_to_all", group, load.payload_bytes // degree, IN_FLIGHT)


def step_points(workloads: Sequence[Workload]) -> Iterator[StepPoint]:
    """Yield a few whole steps of layers, because they are long: with all tokens, and a quarter."""
    for load in workloads:
        for share, degrees in _STEP_DEGREES.items():
            tokens = max(load.tokens_per_rank // share, 1)
            for degree in degrees:
                if degree <= tokens:
                    yield StepPoint(workload=replace(load, tokens_per_rank=tokens), degree=degree)


def tensor_points(
    workloads: Sequence[Workload], groups: Sequence[Group], grid: Grid
) -> Iterator[Point]:
    """Yield all-reduces of the tokens; in chunks only for consecutive ranks, as tensor groups."""
    for load in workloads:
        size = load.tokens_per_rank * load.layer.d_model * dtype_bytes(load.dtype)
        for group in groups:
            if group[0] != load.world_size or group[0] == STAGED:
                continue
            yield collective("all_reduce", group, size)
            if not group[1]:
                for degree in grid.degrees:
                    yield collective("all_reduce", group, size // degree, IN_FLIGHT)


def overlapped_exchanges(
    workloads: Sequence[Workload], grid: Grid, *, num_ranks: int
) -> tuple[CollectivePoint, ...]:
    """Return exchanges to overlap: several small, several of middle size, the largest alone.

    Args:
        num_ranks: all measuring ranks: they exchange, and their number divides the bytes.
    """
    low = min(load.payload_bytes for load in workloads) // grid.queued_degrees[-1]
    high = max(load.payload_bytes for load in workloads) // ALONE_CHUNKS
    middle, group = round(math.sqrt(low * high)), (num_ranks, 0)
    queued = (collective("all_to_all", group, size, IN_FLIGHT) for size in (low, middle))
    return (*queued, collective("all_to_all", group, high))


def overlap_points(exchanges: Iterable[CollectivePoint]) -> Iterator[Point]:
    """Yield computation and exchanges of several sizes, alone and at the same time."""
    yield InterferencePoint(victim="comp")
    for comm in exchanges:
        overlapped = InterferencePoint(
            victim="comp", others=("comm",), comm_bytes=comm.num_bytes, is_alone=comm.in_flight == 1
        )
        # The baseline is repeated each time: computation drifts by more than an exchange takes.
        yield replace(overlapped, others=())
        yield overlapped
        yield replace(overlapped, victim="comm", others=("comp",))


_MAX_GRADIENT_LADDERS = 8
_OF_GRADIENTS: tuple[CollectiveOp, ...] = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A whole model whose points are measured.

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
    """Yield a micro-batch's points at every tensor-parallel width that divides the model.

    Args:
        group_sizes: ranks of a tensor-parallel group, in addition to a single rank.
        groups: groups that may reduce gradients and gather parameters.
        max_tokens: tokens of the largest micro-batch; other micro-batches have the grid's fractions
            of it, in whole sequences.
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
    """Return the number of sequences for each micro-batch size, at least 1."""
    most = max(max_tokens // length, 1)
    return list(dict.fromkeys(max(most // fraction, 1) for fraction in grid.fractions))


def _shapes(block: Block, d_model: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield input and output widths of the GEMMs around the experts, on one of `width` ranks."""
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
    """Yield Adam on all parameters and on shards, and collectives of all gradients."""
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
