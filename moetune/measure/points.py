"""Points to measure: those that the given layers and models need, and a grid of sizes.

All sizes are spaced evenly on a logarithm, where costs bend (measuring.md, "Which fit?").
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from moetune.domain.cluster import Cluster, DeviceKind, Group, Machine, spread_groups
from moetune.domain.errors import InputError
from moetune.domain.layer import ACTIVATIONS, LayerShape, Workload
from moetune.domain.model import Transformer
from moetune.domain.samples import (
    AttentionPoint,
    BurstPoint,
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmPoint,
    InterferencePoint,
    Point,
    ResourceClass,
    RowsPoint,
    StepPoint,
)
from moetune.domain.units import dtype_bytes
from moetune.measure.grid import (
    GRIDS,
    IN_FLIGHT,
    OPS,
    STAGED,
    SUSTAINED,
    Grid,
    Preset,
    collective,
    gemm_points,
    ladder,
)
from moetune.measure.layer_points import (
    layer_points,
    overlap_points,
    overlapped_bytes,
    step_points,
    tensor_points,
)
from moetune.measure.transformer_points import transformer_points

_CLASSES: tuple[ResourceClass, ...] = ("comp", "comm", "mem")
_DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h")
_MEMORY_SHARE = 8
_NEIGHBOURS = 2
_NUM_EXPERTS = 8
# Query, key, value, result, and the gradient of each.
_ATTENTION_TENSORS = 8
_ROWS_TENSORS = 5
# Tokens, rows sent and received, results, and the gradient of each.
_STEP_ROWS = 8
# Of exchanges that overlap computation: several, as the loss has a constant and a rate.
_COMM_BYTES: dict[DeviceKind, tuple[int, ...]] = {
    "cpu": (2**14, 2**18, 2**22),
    "cuda": (2**18, 2**22, 2**26),
}
_SMALLEST_BYTES = 2**10
_SMALLEST_COPY_BYTES = 2**16
_LARGEST_COPY_BYTES = 2**28
_SUSTAINED_SHAPE = (8192, 4096)


def default_group_sizes(world_size: int) -> tuple[int, ...]:
    """Return the divisors and the powers of two from 2 up to the world; (1,) for one rank."""
    sizes = [
        size
        for size in range(2, world_size + 1)
        if world_size % size == 0 or size & (size - 1) == 0
    ]
    return tuple(sizes) or (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChoice:
    """Points to measure, each once.

    Args:
        needed: sizes of the layers and models that will be planned.
        others: sizes and kinds of a grid, for other layers.
    """

    needed: tuple[Point, ...]
    others: tuple[Point, ...]

    @property
    def all(self) -> tuple[Point, ...]:
        """Every point, needed ones first."""
        return (*self.needed, *self.others)

    def without(self, known: Container[Point]) -> "PointChoice":
        """Return the points that are not known yet."""
        return PointChoice(
            needed=tuple(point for point in self.needed if point not in known),
            others=tuple(point for point in self.others if point not in known),
        )


def choose_points(
    *,
    cluster: Cluster,
    dtypes: Sequence[str],
    group_sizes: Sequence[int],
    layers: Sequence[LayerShape] = (),
    transformers: Sequence[Transformer] = (),
    preset: Preset = "quick",
    max_tokens: int = 4096,
) -> PointChoice:
    """Return the points that the models and layers need, and those of a grid.

    Under several nodes each collective is measured among consecutive ranks and among ranks
    spread over nodes (`spread_groups`).

    Args:
        group_sizes: ranks of a group; 1 stands for a loopback through host memory in the place
            of a wire, for one CUDA device.
        layers: shapes whose GEMMs, payloads and memory-bound operations are measured exactly.
        transformers: models of which every tensor-parallel width is measured exactly.
        max_tokens: tokens on one rank in one step.

    Raises:
        InputError: an unknown dtype, a group larger than the machine, or a layer whose experts
            divide by none of the group sizes.
    """
    machine = cluster.machine
    _check_sizes(group_sizes, machine.num_devices)
    grid = GRIDS[preset, machine.kind]
    linked = [size for size in group_sizes if size > 1 or machine.kind == "cuda"]
    groups = [*((size, 0) for size in linked), *spread_groups(linked, machine)]
    of_layers = _workloads(layers, dtypes=dtypes, group_sizes=group_sizes, tokens=max_tokens)
    # A model's experts may all be on one rank.
    of_models = _workloads(
        [model.moe for model in transformers], dtypes=dtypes, group_sizes=(1, *group_sizes),
        tokens=max_tokens,
    )  # fmt: skip
    workloads = [*of_layers, *of_models]
    around = (
        transformer_points(
            model, dtype=dtype, group_sizes=linked, groups=groups, max_tokens=max_tokens,
            kind=machine.kind, grid=grid,
        )
        for model in transformers
        for dtype in dtypes
    )  # fmt: skip
    needed: list[Point] = [*layer_points(workloads, groups, grid), *chain.from_iterable(around)]
    others = list(tensor_points(workloads, groups, grid))
    of_model = needed if transformers else others
    of_model += _collective_grid(groups, grid)
    if linked and workloads:
        needed += overlap_points(overlapped_bytes(workloads, grid, num_ranks=machine.num_devices))
    elif linked:
        others += overlap_points(_COMM_BYTES[machine.kind])
    needed += step_points(of_layers)
    offloading = _offloading(
        machine.kind, dtypes, grid, has_link=bool(linked), is_planned=bool(workloads)
    )
    needed += offloading.needed
    others += offloading.others
    if not transformers:
        others += _gemm_grid(dtypes, max_tokens, grid, forward_only=bool(workloads))
    if not workloads:
        others += _rows_grid(dtypes, max_tokens, grid)
    chosen = PointChoice(needed=that_fit(needed, machine), others=that_fit(others, machine))
    return replace(chosen, others=chosen.without(frozenset(chosen.needed)).others)


def _offloading(
    kind: DeviceKind, dtypes: Sequence[str], grid: Grid, *, has_link: bool, is_planned: bool
) -> PointChoice:
    """Return copies, and what computation, exchanges and copies lose to each other.

    Args:
        is_planned: for given layers, whose plans may offload activations from a GPU, on streams
            beside computation and exchanges.
    """
    copies = tuple(_copy_grid(kind, grid))
    losses = tuple(_interference(has_link=has_link))
    needed: tuple[Point, ...] = ()
    if kind == "cuda" and is_planned:
        needed = (*losses, *(one for one in copies if one.pinned), *_sustained(dtypes))
    return PointChoice(needed=needed, others=(*losses, *copies))


def that_fit(points: Iterable[Point], machine: Machine) -> tuple[Point, ...]:
    """Return the points whose tensors leave enough of the machine's memory free, each once."""
    limit = machine.memory_bytes // _MEMORY_SHARE
    return tuple(one for one in dict.fromkeys(points) if memory_bytes(one) <= limit)


def _check_sizes(group_sizes: Sequence[int], num_ranks: int) -> None:
    for size in group_sizes:
        if not 1 <= size <= num_ranks:
            raise InputError(
                f"group size {size} is not possible with {num_ranks} ranks",
                "start more ranks, or ask for smaller groups",
            )


def _workloads(
    layers: Sequence[LayerShape],
    *,
    dtypes: Sequence[str],
    group_sizes: Sequence[int],
    tokens: int,
) -> list[Workload]:
    """Return every layer with experts, in every dtype, on every group that may share them."""
    return [
        Workload(layer=layer, world_size=size, tokens_per_rank=tokens, dtype=dtype)
        for layer in layers
        for dtype in dtypes
        for size in _fitting(layer, group_sizes)
    ]


def _fitting(layer: LayerShape, group_sizes: Sequence[int]) -> list[int]:
    """Return the group sizes that divide the experts, each once."""
    fitting = [size for size in dict.fromkeys(group_sizes) if layer.num_experts % size == 0]
    if not fitting:
        raise InputError(
            f"{layer.num_experts} experts divide by none of the group sizes "
            f"{', '.join(map(str, group_sizes))}",
            "use a multiple of the ranks, or ask for another group size",
        )
    return fitting


def _interference(*, has_link: bool) -> Iterator[Point]:
    classes = [name for name in _CLASSES if has_link or name != "comm"]
    for victim in classes:
        others = tuple(name for name in classes if name != victim)
        sets = {(), *((name,) for name in others), others}
        for others in sorted(sets, key=lambda names: (len(names), names)):
            yield InterferencePoint(victim=victim, others=others)


def _sustained(dtypes: Sequence[str]) -> Iterator[Point]:
    """Yield a product for seconds, in the fastest of the dtypes, and the same in short blocks."""
    dtype = next((one for one in ("bfloat16", "float16") if one in dtypes), dtypes[0])
    rows, width = _SUSTAINED_SHAPE
    yield RowsPoint(op=SUSTAINED, dtype=dtype, rows=rows, width=width)
    yield GemmPoint(dtype=dtype, rows=rows, d_in=width, d_out=width)


def _gemm_grid(
    dtypes: Sequence[str], max_tokens: int, grid: Grid, *, forward_only: bool
) -> Iterator[Point]:
    """Yield every shape with few and many rows; the forward form alone, or all three forms."""
    for dtype in dtypes:
        for d_model, d_hidden in grid.shapes:
            for experts in grid.experts:
                for divisor in grid.row_divisors:
                    rows = -(-max_tokens // (divisor * experts))
                    for d_in, d_out in ((d_model, d_hidden), (d_hidden, d_model)):
                        points = list(gemm_points(dtype, experts, rows, d_in, d_out))
                        wanted = points[:1] if forward_only else points
                        yield from (one for one in wanted if one.macs <= grid.max_macs)


def _collective_grid(groups: Sequence[Group], grid: Grid) -> Iterator[Point]:
    for group in groups:
        size, num_nodes = group
        for op in OPS if size > STAGED else OPS[:1]:
            if op == "send" and num_nodes and size > _NEIGHBOURS:
                continue  # only neighbouring stages send: two ranks on two nodes are enough
            step = grid.bytes_step if op == "all_to_all" else 2 * grid.bytes_step
            for num_bytes in ladder(_SMALLEST_BYTES, grid.max_bytes, step):
                for in_flight in (1, IN_FLIGHT) if op in grid.queued else (1,):
                    yield collective(op, group, num_bytes, in_flight)


def _copy_grid(kind: DeviceKind, grid: Grid) -> Iterator[CopyPoint]:
    """Yield copies both ways; a CPU does not pin memory: there "pinned" stands for both kinds."""
    # Page-locked memory of a gigabyte takes as long to get as hundreds of copies.
    largest = 4 * grid.max_bytes if kind == "cpu" else _LARGEST_COPY_BYTES
    for num_bytes in ladder(_SMALLEST_COPY_BYTES, largest, grid.copy_bytes_step):
        for direction in _DIRECTIONS:
            for pinned in (True, False) if kind == "cuda" else (True,):
                for both_ways in (False, True):
                    yield CopyPoint(
                        direction=direction, pinned=pinned, num_bytes=num_bytes,
                        both_ways=both_ways,
                    )  # fmt: skip


def _rows_grid(dtypes: Sequence[str], max_tokens: int, grid: Grid) -> Iterator[Point]:
    narrow, wide = grid.shapes[-1]
    activations = [op for name in ACTIVATIONS for op in (name, f"{name}_backward")]
    widths = {**dict.fromkeys(activations, wide), "gather": narrow, "scatter_add": narrow,
              "gate": _NUM_EXPERTS, "gate_backward": _NUM_EXPERTS}  # fmt: skip
    for dtype in dtypes:
        for divisor in grid.row_divisors:
            rows = -(-max_tokens // divisor)
            for op, width in widths.items():
                yield RowsPoint(op=op, dtype=dtype, rows=rows, width=width)


def memory_bytes(point: Point) -> int:
    """Return roughly the bytes of the point's tensors on one rank."""
    if isinstance(point, (CollectivePoint, BurstPoint)):
        received = point.group_size if point.op == "all_gather" else 1
        return point.in_flight * point.num_bytes * (1 + received)
    if isinstance(point, CopyPoint):
        return 2 * point.num_bytes * (1 + point.both_ways)
    if isinstance(point, InterferencePoint):
        return 0
    dtype = point.workload.dtype if isinstance(point, StepPoint) else point.dtype
    return _elements(point) * dtype_bytes(dtype)


def _elements(point: GemmPoint | RowsPoint | AttentionPoint | StepPoint) -> int:
    if isinstance(point, GemmPoint):
        elements = point.rows * (point.d_in + point.d_out) + point.d_in * point.d_out
        return point.num_experts * elements
    if isinstance(point, RowsPoint):
        return _ROWS_TENSORS * point.elements
    if isinstance(point, AttentionPoint):
        tokens = point.num_sequences * point.length
        return _ATTENTION_TENSORS * tokens * point.num_heads * point.head_dim
    load, layer = point.workload, point.workload.layer
    weights = load.local_experts * layer.num_gemms * layer.d_model * layer.d_hidden
    rows = load.rows * (_STEP_ROWS * layer.d_model + layer.num_gemms * layer.d_hidden)
    return 2 * weights + rows
