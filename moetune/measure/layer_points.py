"""Points of layers, and of whole models around their experts.

Of layers the GEMMs, exchanges and memory-bound operations of their chunks; of models attention,
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
"""Of the kernels that multiply all experts at once."""
_FEW_TOKENS = 16
"""Part of the tokens for which an exchange that is alone is measured, too."""
_STEP_DEGREES: Mapping[int, tuple[int, ...]] = MappingProxyType({1: (1, 4, 16), 4: (1, 4)})
"""Numbers of chunks whose whole steps are measured, by the divisor of the tokens."""


def layer_points(
    workloads: Sequence[Workload], groups: Sequence[Group], grid: Grid
) -> Iterator[Point]:
    """Yield what every layer computes and sends, in the grid's numbers of chunks."""
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
    """Yield the GEMMs of a layer's experts in one of so many chunks, with even loads."""
    shape = (load.layer.d_model, load.layer.d_hidden)
    rows = -(-load.rows // (degree * load.local_experts))
    for d_in, d_out in (shape, shape[::-1]):
        yield from gemm_points(load.dtype, load.local_experts, rows, d_in, d_out)


def uneven_points(workloads: Sequence[Workload], grid: Grid) -> Iterator[Point]:
    """Yield the GEMMs of layers where a single expert of a rank has most of the rows.

    A kernel for all experts takes longer then; a kernel for each takes as long as with even loads.
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
    """Yield the GEMMs of layers by other kernels than the usual, in half of the chunks' sizes.

    Args:
        kernels_of: the kernels that can run a layer's experts, but for the usual kernel.
    """
    for load in workloads:
        for kernel in kernels_of(load):
            # A loop is another kernel on GPUs alone, where only one chunk of it may be worth it.
            for degree in grid.degrees[: 1 if kernel == "loop" else None : 2]:
                for point in _gemms(load, degree):
                    yield replace(point, kernel=kernel)


def launch_points(workloads: Sequence[Workload]) -> Iterator[Point]:
    """Yield layers in few and in many chunks, so small that the host's launches are their time."""
    for dtype in {load.dtype: None for load in workloads}:
        for op in LAUNCHES:
            for chunks in HOST_CHUNKS:
                yield RowsPoint(op=op, dtype=dtype, rows=chunks, width=1)


def gate_points(workloads: Sequence[Workload], grid: Grid) -> Iterator[Point]:
    """Yield the GEMMs of layers' gates: one matrix, as narrow as the layer has experts.

    A blend of the experts' GEMMs knows neither so narrow a matrix nor so many rows.
    """
    for load in workloads:
        for degree in grid.degrees[::2]:
            rows = max(load.tokens_per_rank // degree, 1)
            yield from gemm_points(load.dtype, 1, rows, load.layer.d_model, load.layer.num_experts)


def _exchanges(load: Workload, group: Group, grid: Grid) -> Iterator[Point]:
    """Yield all-to-alls of the rows in chunks, alone and several at once."""
    for degree in (*range(1, ALONE_CHUNKS + 1), _FEW_TOKENS):
        yield collective("all_to_all", group, load.payload_bytes // degree)
    for degree in grid.queued_degrees:
        yield collective("all_to_all", group, load.payload_bytes // degree, IN_FLIGHT)


def step_points(workloads: Sequence[Workload]) -> Iterator[StepPoint]:
    """Yield whole steps of layers, few as they are long: with all tokens, and a quarter of them."""
    for load in workloads:
        for share, degrees in _STEP_DEGREES.items():
            tokens = max(load.tokens_per_rank // share, 1)
            for degree in degrees:
                if degree <= tokens:
                    yield StepPoint(workload=replace(load, tokens_per_rank=tokens), degree=degree)


def tensor_points(
    workloads: Sequence[Workload], groups: Sequence[Group], grid: Grid
) -> Iterator[Point]:
    """Yield all-reduces of the tokens; in chunks, as of tensor groups, of consecutive ranks."""
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
    """Return exchanges that overlap others: the smallest, the middle, and the largest alone.

    Args:
        num_ranks: all that measure: they exchange, and their number divides the bytes.
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
        # The baseline again each time: computation drifts by more than an exchange takes.
        yield replace(overlapped, others=())
        yield overlapped
        yield replace(overlapped, victim="comm", others=("comp",))


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
        group_sizes: ranks of a tensor-parallel group, in addition to a single rank.
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
    """Return the sequences of each size of micro-batch, at least 1."""
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
