"""The operations that a profile knows: measured points, or else a published line."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from moetune.domain.cluster import Group
from moetune.domain.costs import Burst
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.profile import CollectiveLine, CopyLine, FitError, GemmLine, Profile
from moetune.domain.samples import CollectiveOp
from moetune.fit.curve import ASSUMED_RELATIVE_ERROR, Line
from moetune.fit.gemm import Surface
from moetune.fit.interference import (
    OverlapLoss,
    comm_loss,
    comp_loss,
    interference_of,
)
from moetune.fit.left_out import interpolation_errors
from moetune.fit.model_error import OF_LAYERS
from moetune.fit.pool import (
    AttentionKey,
    CollectiveKey,
    CopyKey,
    Pool,
    RowsKey,
    Series,
    Shape,
    pool,
)
from moetune.fit.reference import Origin, Tables, with_tables
from moetune.fit.step_errors import MachineErrors, drift_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Measured points of one operation, and the other inputs of its curve.

    Args:
        label: the same for the same operation in every run: it seeds random draws.
        family: name of the operations that share one systematic error.
        alpha_seconds: start-up time of the fitted line.
        relative_error: typical error of a prediction.
        origin: of the points that are no samples; None where all are.
    """

    label: str
    family: str
    series: Series
    alpha_seconds: float
    relative_error: float
    origin: Origin | None = None


class ProfileIndex:
    """A profile's samples and lines by operation, worked out when they are first read."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._gemm_lines = {line.dtype: line for line in profile.gemm}
        self._collective_lines: dict[CollectiveKey, CollectiveLine] = {
            (line.op, line.group_size, line.num_nodes, line.in_flight): line
            for line in profile.collective
        }
        self._copy_lines: dict[CopyKey, CopyLine] = {
            (line.direction, line.pinned, line.both_ways): line for line in profile.copy
        }
        self._surfaces: dict[tuple[str, GemmForm], Surface] = {}
        self._rows_lines = {(line.op, line.dtype): line for line in profile.rows}
        self._rows: dict[RowsKey, Points | Line | None] = {}
        self._collectives: dict[CollectiveKey, Points] = {}
        self._groups: dict[CollectiveOp, tuple[Group, ...]] = {}
        self._in_flight: dict[tuple[CollectiveOp, Group], tuple[int, ...]] = {}

    @cached_property
    def pool(self) -> Pool:
        """The profile's samples and tables by operation."""
        return self.tables.pool

    @cached_property
    def tables(self) -> Tables:
        """The same, with the origins of what is from tables."""
        return with_tables(pool(self.profile.samples), self.profile.tables)

    @cached_property
    def bursts(self) -> Mapping[tuple[CollectiveOp, Group], Burst]:
        """Each collective's burst, by its group."""
        return {
            (one.op, (one.group_size, one.num_nodes)): Burst(seconds=one.seconds, share=one.share)
            for one in self.profile.bursts
        }

    @cached_property
    def step_errors(self) -> MachineErrors:
        """Errors of layers' steps on this machine."""
        return MachineErrors(
            self.profile.steps, own=OF_LAYERS.own, drift=drift_of(self.profile.samples)
        )

    @cached_property
    def comp_loss(self) -> OverlapLoss | None:
        """Time that exchanges cost computation; None where not measured or set by hand."""
        return comp_loss(self.pool) if self.has_own_interference else None

    @cached_property
    def comm_loss(self) -> OverlapLoss | None:
        """Time that computation costs exchanges; None where not measured or set by hand."""
        return comm_loss(self.pool) if self.has_own_interference else None

    @cached_property
    def has_own_interference(self) -> bool:
        """Whether the profile's factors are those of its samples, not set by hand."""
        return interference_of(self.pool.interference) == self.profile.interference

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes with a GEMM."""
        return tuple(sorted({dtype for dtype, _, _ in self.pool.gemm} | self._gemm_lines.keys()))

    @cached_property
    def gemm_forms(self) -> tuple[tuple[str, GemmForm], ...]:
        """The measured forms of the GEMM, of each dtype."""
        return tuple(sorted({(dtype, product) for dtype, product, _ in self.pool.gemm}))

    def surface(self, dtype: str, product: GemmForm) -> Surface:
        """Return the measured shapes of one of `gemm_forms`."""
        key = (dtype, product)
        if key not in self._surfaces:
            line = self._gemm_lines.get(dtype)
            self._surfaces[key] = Surface(
                shapes={
                    shape: series
                    for (*form, shape), series in self.pool.gemm.items()
                    if tuple(form) == key
                },
                family=f"gemm {dtype} {product}",
                alpha_seconds=line.alpha_seconds if line else 0.0,
                relative_error=line.error.median if line and line.error else None,
            )
        return self._surfaces[key]

    def gemm_points(self, dtype: str, product: GemmForm, shape: Shape) -> Points | None:
        """Return the points over rows; None where the shape was not measured.

        Tables have few rows of some shapes: the others are completed from other shapes, but for a
        shape of which some rows were measured.
        """
        surface = self.surface(dtype, product)
        series = surface.series(shape)
        if series is None:
            return None
        origin = self.tables.gemm.get((dtype, product, shape))
        if origin is not None and not origin.has_samples:
            series = surface.completed(shape)
        return Points(
            label=f"{surface.family} {shape}",
            family=surface.family,
            series=series,
            alpha_seconds=surface.alpha_seconds,
            relative_error=surface.relative_error,
            origin=origin,
        )

    def blend_origin(self, dtype: str, product: GemmForm) -> Origin | None:
        """Return the origin of the first shape from a table, which blends are mixed of."""
        keys = self.tables.gemm.items()
        return next(
            (replace(origin, low=math.inf, high=-math.inf) for (one, form, _), origin in keys
             if (one, form) == (dtype, product)),
            None,
        )  # fmt: skip

    def gemm_line(self, dtype: str) -> Line | None:
        """Return the dtype's line over MACs where it was not measured."""
        line = self._gemm_lines.get(dtype)
        if line is None or any(dtype == one for one, _ in self.gemm_forms):
            return None
        return _line(line)

    def groups(self, op: CollectiveOp) -> tuple[Group, ...]:
        """Return the groups the collective is known for, ascending."""
        if op not in self._groups:
            keys = self.pool.collective.keys() | self._collective_lines.keys()
            found = {(size, nodes) for one, size, nodes, _ in keys if one == op}
            self._groups[op] = tuple(sorted(found))
        return self._groups[op]

    def in_flight(self, op: CollectiveOp, group: Group) -> tuple[int, ...]:
        """Return the numbers in flight that it is known for: of samples, else of lines."""
        found = self._in_flight.get((op, group), ())
        for keys in (self.pool.collective, self._collective_lines):
            found = found or tuple(
                sorted(several for one, *where, several in keys if (one, *where) == (op, *group))
            )
        self._in_flight[op, group] = found
        return found

    def collective(self, key: CollectiveKey) -> Points | Line:
        """Return the points, else the line, of a collective with one of those numbers in flight."""
        if key not in self._collectives:
            series, line = self.pool.collective.get(key), self._collective_lines.get(key)
            if series is None:
                return _line(self._collective_lines[key])
            found = _points(f"collective {key}", series, line)
            self._collectives[key] = replace(found, origin=self.tables.collective.get(key))
        return self._collectives[key]

    def copies(self) -> tuple[CopyKey, ...]:
        """Return the known kinds of copy."""
        return tuple(sorted(self.pool.copy.keys() | self._copy_lines.keys()))

    def copy(self, key: CopyKey) -> Points | Line:
        """Return the points, else the line, of one of `copies`."""
        series = self.pool.copy.get(key)
        if series is None:
            return _line(self._copy_lines[key])
        return _points(f"copy {key}", series, self._copy_lines.get(key))

    def rows(self, key: RowsKey) -> Points | Line | None:
        """Return the points, else the line, over elements; None for an unknown operation."""
        if key not in self._rows:
            series, line = self.pool.rows.get(key), self._rows_lines.get(key)
            known = None if line is None else Line(cost=line.cost)
            self._rows[key] = known if series is None else _points(f"rows {key}", series, None)
        return self._rows[key]

    def rows_keys(self) -> tuple[RowsKey, ...]:
        """Return the operations that `rows` knows."""
        return tuple(sorted(self.pool.rows.keys() | self._rows_lines.keys()))

    def attention(self, key: AttentionKey) -> Points:
        """Return the points over sequences of one of the pool's shapes."""
        return _points(f"attention {key}", self.pool.attention[key], None)


@lru_cache(maxsize=8)
def index_of(profile: Profile) -> ProfileIndex:
    """Return the profile's index, made once: one plan after the other asks the same one."""
    return ProfileIndex(profile)


_AnyLine = GemmLine | CollectiveLine | CopyLine


def _points(label: str, series: Series, line: _AnyLine | None) -> Points:
    alpha_seconds = line.alpha_seconds if line else 0.0
    return Points(
        label=label,
        family=label,
        series=series,
        alpha_seconds=alpha_seconds,
        relative_error=_typical_error(series, alpha_seconds, line.error if line else None),
    )


def _typical_error(series: Series, alpha_seconds: float, error: FitError | None) -> float:
    if error is not None:
        return error.median
    errors = interpolation_errors(
        sizes=series.sizes, seconds=series.medians, alpha_seconds=alpha_seconds
    )
    return statistics.median(errors) if errors else ASSUMED_RELATIVE_ERROR


def _line(line: _AnyLine) -> Line:
    error = line.error.median if line.error else ASSUMED_RELATIVE_ERROR
    return Line(cost=line.cost, relative_error=error)
