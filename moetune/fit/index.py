"""The operations that a profile knows: measured points, or else a published line."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from moetune.domain.cluster import Group
from moetune.domain.cost_keys import CollectiveKey, CostKey, GemmKey, label_of
from moetune.domain.costs import Trust
from moetune.domain.kernels import KernelName
from moetune.domain.once import Tables, once
from moetune.domain.profile import FitError, OperationLine, Profile
from moetune.domain.reference import GemmTable
from moetune.domain.samples import CollectiveOp, GemmForm, ResourceClass
from moetune.fit.curve import ASSUMED_RELATIVE_ERROR, Curve, Line, interpolation_errors
from moetune.fit.gemm import Surface
from moetune.fit.interference import OverlapLoss, interference_of, overlap_loss
from moetune.fit.pool import Key, Origin, Pool, Series, pool, with_tables
from moetune.fit.step_errors import RECORDED_SPREAD, MachineErrors, drift_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Measured points of one operation, and the other inputs of its curve.

    Args:
        origin: table of the points that are not samples; None if all are samples.
    """

    label: str
    family: str
    series: Series
    alpha_seconds: float
    relative_error: float
    origin: Origin | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """The curve of an unmeasured GEMM shape, blended from the measured shapes of its family."""

    curve: Curve
    family: str
    origin: Origin | None


Basis = Points | Blend | Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The basis that predicts an operation: its measurements, or those of a stand-in.

    Args:
        key: the operation that the basis belongs to.
        stretch: size on the basis for each unit of the wanted operation's size.
        cap: highest trust in a prediction from it.
        spread: error of a stand-in, the standard deviation of a logarithm.
    """

    key: CostKey
    basis: Basis
    stretch: float = 1.0
    cap: Trust = "measured"
    spread: float = 0.0
    stand_in: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfileIndex(Tables):
    """A profile's samples and lines by operation, computed when first read."""

    profile: Profile

    @cached_property
    def lines(self) -> Mapping[CostKey, OperationLine]:
        """The profile's lines by operation."""
        profile = self.profile
        lines: tuple[OperationLine, ...] = (
            *profile.gemm, *profile.collective, *profile.copy, *profile.rows
        )  # fmt: skip
        return {line.key: line for line in lines}

    @cached_property
    def pool(self) -> Pool:
        """The profile's samples and tables by operation."""
        return with_tables(pool(self.profile.samples), self.profile.tables)

    @cached_property
    def step_errors(self) -> MachineErrors:
        """Errors of whole layer steps on this machine."""
        profile = self.profile
        is_published = any(isinstance(table, GemmTable) for table in profile.tables)
        return MachineErrors(
            records=profile.steps, spread=RECORDED_SPREAD, drift=drift_of(profile.samples),
            has_published_kernels=is_published and not profile.samples,
        )  # fmt: skip

    @once(lambda victim: victim)
    def overlap_loss(self, victim: ResourceClass) -> OverlapLoss | None:
        """Return what a class loses to the other class; None if unmeasured, or if set by hand."""
        return overlap_loss(self.pool, victim) if self.has_measured_interference else None

    @cached_property
    def has_measured_interference(self) -> bool:
        """Whether the profile's factors come from its samples and were not set by hand."""
        return interference_of(self.pool.interference) == self.profile.interference

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes for which the profile has a GEMM."""
        return tuple(sorted({key.dtype for key in self.keys(GemmKey)}))

    @cached_property
    def gemm_forms(self) -> tuple[tuple[str, GemmForm, KernelName], ...]:
        """The measured GEMM forms as (dtype, form, kernel), sorted."""
        keys = self.pool.of(GemmKey)
        return tuple(sorted({(key.dtype, key.product, key.kernel) for key in keys}))

    @once(lambda dtype, product, kernel: (dtype, product, kernel))
    def surface(self, dtype: str, product: GemmForm, kernel: KernelName) -> Surface:
        """Return the surface of measured shapes for an entry of `gemm_forms`."""
        line = self.lines.get(GemmKey(dtype))
        return Surface(
            shapes={
                key.shape: series
                for key, series in self.pool.of(GemmKey).items()
                if (key.dtype, key.product, key.kernel) == (dtype, product, kernel)
            },
            family=f"gemm {dtype} {product} {kernel}".rstrip(),
            alpha_seconds=line.alpha_seconds if line else 0.0,
            measured_error=line.error.median if line and line.error else None,
        )

    def gemm_points(self, key: GemmKey) -> Points | None:
        """Return the points over rows; None if the shape was not measured.

        Tables have few rows of some shapes. If all points of a shape come from tables, other shapes
        complete it (`Surface.complete_series`).
        """
        surface = self.surface(key.dtype, key.product, key.kernel)
        series = surface.shapes.get(key.shape)
        if series is None:
            return None
        origin = self.pool.origins.get(key)
        if origin is not None and origin.low > origin.high:  # no samples of this shape
            series = surface.complete_series(key.shape)
        return Points(
            label=f"{surface.family} {key.shape}",
            family=surface.family,
            series=series,
            alpha_seconds=surface.alpha_seconds,
            relative_error=surface.relative_error,
            origin=origin,
        )

    def gemm_blend(self, key: GemmKey) -> Blend:
        """Return the shape blended from others of its form; their first table is its origin."""
        surface = self.surface(key.dtype, key.product, key.kernel)
        origins = (
            replace(origin, low=math.inf, high=-math.inf)
            for of, origin in self.pool.origins.items()
            if isinstance(of, GemmKey) and (*of[:2], of.kernel) == (*key[:2], key.kernel)
        )
        return Blend(
            curve=surface.blend(key.shape), family=surface.family, origin=next(origins, None)
        )

    def gemm_line(self, dtype: str) -> Line | None:
        """Return the dtype's line over MACs; None if GEMMs of the dtype were measured."""
        is_measured = any(dtype == measured for measured, *_ in self.gemm_forms)
        basis = None if is_measured else self.basis(GemmKey(dtype))
        return basis if isinstance(basis, Line) else None

    @once(lambda op: op)
    def groups(self, op: CollectiveOp) -> tuple[Group, ...]:
        """Return the groups for which the collective is known, ascending."""
        return tuple(sorted({key.group for key in self.keys(CollectiveKey) if key.op == op}))

    @once(lambda op, group: (op, group))
    def in_flight(self, op: CollectiveOp, group: Group) -> tuple[int, ...]:
        """Return the known numbers in flight of a collective: from points, else from lines."""
        numbers = (
            sorted(
                key.in_flight
                for key in keys
                if isinstance(key, CollectiveKey) and (key.op, key.group) == (op, group)
            )
            for keys in (self.pool.series, self.lines)
        )
        return tuple(next(filter(None, numbers), ()))

    def keys(self, kind: type[Key]) -> tuple[Key, ...]:
        """Return the operations of a kind that have points or a line, ascending."""
        keys = self.pool.series.keys() | self.lines.keys()
        return tuple(sorted(key for key in keys if isinstance(key, kind)))

    @once(lambda key: key)
    def basis(self, key: CostKey) -> Points | Line | None:
        """Return the points of an operation, else its line; None if it has neither."""
        series, line = self.pool.series.get(key), self.lines.get(key)
        error = None if line is None else line.error
        if series is not None:
            alpha_seconds = line.alpha_seconds if line else 0.0
            return Points(
                label=label_of(key),
                family=label_of(key),
                series=series,
                alpha_seconds=alpha_seconds,
                relative_error=_typical_error(series, alpha_seconds, error),
                origin=self.pool.origins.get(key),
            )
        if line is None:
            return None
        relative_error = error.median if error else ASSUMED_RELATIVE_ERROR
        return Line(cost=line.cost, label=label_of(key), relative_error=relative_error)


@lru_cache(maxsize=8)
def index_of(profile: Profile) -> ProfileIndex:
    """Return the profile's index, cached because successive plans use the same profile."""
    return ProfileIndex(profile=profile)


def _typical_error(series: Series, alpha_seconds: float, error: FitError | None) -> float:
    if error is not None:
        return error.median
    errors = interpolation_errors(
        sizes=series.sizes, seconds=series.medians, alpha_seconds=alpha_seconds
    )
    return statistics.median(errors) if errors else ASSUMED_RELATIVE_ERROR
