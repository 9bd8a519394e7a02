"""Points to measure: the points that the given layers and models need, and a grid of sizes.

Sizes are evenly spaced on a log scale, on which costs bend (measuring.md, "Which fit?").
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.cluster import DeviceKind, Group, Machine
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.samples import Point
from moetune.measure.grid import (
    GRIDS,
    IN_FLIGHT,
    Grid,
    Preset,
    collective,
    collective_grid,
    copy_grid,
    gemm_grid,
    interference,
    large_product,
    optimizer_grid,
    rows_grid,
)
from moetune.measure.layer_points import (
    KernelsOf,
    MeasuredModel,
    decoder_points,
    gate_points,
    kernel_points,
    launch_points,
    layer_points,
    overlap_points,
    overlapped_exchanges,
    step_points,
    tensor_points,
    uneven_points,
)
from moetune.measure.ranks import spread_groups
from moetune.measure.sizes import memory_bytes

_MEMORY_SHARE = 8
# Exchanges that overlap computation have several sizes: the loss has a constant and a rate.
_COMM_BYTES: dict[DeviceKind, tuple[int, ...]] = {
    "cpu": (2**14, 2**18, 2**22),
    "cuda": (2**18, 2**22, 2**26),
}


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
    """The points to measure, each only once.

    Args:
        needed: points of the layers and models that will be planned.
        optional: points of a grid of sizes and kinds, for other layers.
    """

    needed: tuple[Point, ...]
    optional: tuple[Point, ...]

    @property
    def all(self) -> tuple[Point, ...]:
        """All points, with the needed points first."""
        return (*self.needed, *self.optional)

    def without(self, done: Container[Point]) -> "PointChoice":
        """Return the points that are not measured yet."""
        return PointChoice(
            needed=tuple(point for point in self.needed if point not in done),
            optional=tuple(point for point in self.optional if point not in done),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointScope:
    """The layers and models to measure for, and where.

    On several nodes, each collective is measured among consecutive ranks and among ranks that are
    spread over nodes (`spread_groups`).

    Args:
        group_sizes: numbers of ranks in a group; 1 stands for a loopback through host memory
            instead of a link, for a single CUDA device.
        layers: shapes whose GEMMs, payloads and memory-bound operations are measured exactly.
        models: whole models, of which every tensor-parallel width is measured exactly.
        max_tokens: tokens on one rank in one step.
        kernels_of: as in `kernel_points`; by default only the default kernel is measured.
    """

    machine: Machine
    dtypes: Sequence[str]
    group_sizes: Sequence[int]
    layers: Sequence[LayerShape] = ()
    models: Sequence[MeasuredModel] = ()
    preset: Preset = "quick"
    max_tokens: int = 4096
    kernels_of: KernelsOf = lambda _: ()

    def points(self) -> PointChoice:
        """Return the points that the models and layers need, and the points of a grid.

        Raises:
            InputError: a dtype is unknown, a group is larger than the machine, or no group size
                divides a layer's experts.
        """
        _check_sizes(self.group_sizes, self.machine.num_devices)
        needed = that_fit(self._needed(), self.machine)
        chosen = frozenset(needed)
        rest = (point for point in self._optional() if point not in chosen)
        return PointChoice(needed=needed, optional=that_fit(rest, self.machine))

    @property
    def grid(self) -> Grid:
        """The preset's sizes on this kind of device."""
        return GRIDS[self.preset, self.machine.kind]

    @property
    def of_layers(self) -> list[Workload]:
        """The workloads of the layers that were named directly."""
        return _workloads(
            self.layers, dtypes=self.dtypes, group_sizes=self.group_sizes, tokens=self.max_tokens
        )

    @property
    def workloads(self) -> list[Workload]:
        """The workloads of all expert layers; a model's experts may all be on one rank."""
        of_models = _workloads(
            [model.decoder.layer for model in self.models if model.decoder.num_moe_layers],
            dtypes=self.dtypes, group_sizes=(1, *self.group_sizes), tokens=self.max_tokens,
        )  # fmt: skip
        return [*self.of_layers, *of_models]

    @property
    def linked(self) -> list[int]:
        """The sizes of the groups that have a link, or a loopback instead."""
        return [size for size in self.group_sizes if size > 1 or self.machine.kind == "cuda"]

    @property
    def groups(self) -> list[Group]:
        """The groups of consecutive ranks, and the groups of ranks that are spread over nodes."""
        return [*((size, 0) for size in self.linked), *spread_groups(self.linked, self.machine)]

    def _needed(self) -> Iterator[Point]:
        """Yield the points of the layers and models."""
        workloads, grid = self.workloads, self.grid
        yield from layer_points(workloads, self.groups, grid)
        for model in self.models:
            for dtype in self.dtypes:
                yield from decoder_points(
                    model, dtype=dtype, group_sizes=self.linked, groups=self.groups,
                    max_tokens=self.max_tokens, kind=self.machine.kind, grid=grid,
                )  # fmt: skip
        if self.models:
            yield from collective_grid(self.groups, grid)
        if self.linked and workloads:
            num_ranks = self.machine.num_devices
            yield from overlap_points(overlapped_exchanges(workloads, grid, num_ranks=num_ranks))
        yield from kernel_points(workloads, grid, self.kernels_of)
        yield from step_points(self.of_layers)
        if self.machine.kind == "cuda" and workloads:
            # Plans may offload activations, on other streams than computation and exchanges.
            yield from interference(has_link=bool(self.linked))
            yield from (point for point in copy_grid(self.machine.kind, grid) if point.pinned)
            yield large_product(self.dtypes)
            yield from uneven_points(workloads, grid)
            yield from gate_points(workloads, grid)
            yield from launch_points(workloads)

    def _optional(self) -> Iterator[Point]:
        """Yield the grid's points, for operations that the layers and models do not cover."""
        workloads, grid = self.workloads, self.grid
        yield from tensor_points(workloads, self.groups, grid)
        if not self.models:
            yield from collective_grid(self.groups, grid)
        if self.linked and not workloads:
            group = (self.machine.num_devices, 0)
            yield from overlap_points(
                collective("all_to_all", group, size, IN_FLIGHT)
                for size in _COMM_BYTES[self.machine.kind]
            )
        yield from interference(has_link=bool(self.linked))
        yield from copy_grid(self.machine.kind, grid)
        if not self.models:
            forward_only = bool(workloads)
            yield from gemm_grid(self.dtypes, self.max_tokens, grid, forward_only=forward_only)
        if not workloads:
            yield from rows_grid(self.dtypes, self.max_tokens, grid)
        yield from optimizer_grid(self.dtypes, self.machine.kind)


def that_fit(points: Iterable[Point], machine: Machine) -> tuple[Point, ...]:
    """Return the points whose tensors leave enough memory of the machine free, each only once."""
    limit = machine.memory_bytes // _MEMORY_SHARE
    return tuple(point for point in dict.fromkeys(points) if memory_bytes(point) <= limit)


def _check_sizes(group_sizes: Sequence[int], num_ranks: int) -> None:
    for size in group_sizes:
        if not 1 <= size <= num_ranks:
            raise InputError(
                f"--group-sizes {size} is not possible with {num_ranks} ranks",
                "start more ranks, or ask for smaller groups",
            )


def _workloads(
    layers: Sequence[LayerShape], *, dtypes: Sequence[str], group_sizes: Sequence[int], tokens: int
) -> list[Workload]:
    """Return each expert layer's workloads: in each dtype, on each group size that divides it."""
    return [
        Workload(layer=layer, world_size=size, tokens_per_rank=tokens, dtype=dtype)
        for layer in layers
        for dtype in dtypes
        for size in _fitting(layer, group_sizes)
    ]


def _fitting(layer: LayerShape, group_sizes: Sequence[int]) -> list[int]:
    """Return the group sizes that divide the number of experts, each only once."""
    fitting = [size for size in dict.fromkeys(group_sizes) if layer.num_experts % size == 0]
    if not fitting:
        raise InputError(
            f"{layer.num_experts} experts divide by none of the group sizes "
            f"{', '.join(map(str, group_sizes))}",
            "use a multiple of the ranks, or ask for another group size",
        )
    return fitting
