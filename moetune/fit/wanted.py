"""Points that a question asks of a profile, such as all that decide a plan."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from moetune.domain.costs import Costs, Estimate
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.profile import Profile
from moetune.domain.samples import (
    AttentionPoint,
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    Direction,
    GemmPoint,
    Point,
    RowsPoint,
)
from moetune.fit.costs import ProfileCosts
from moetune.fit.index import ProfileIndex, index_of
from moetune.fit.predictor import ExactCurves, Name, Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One operation at a size that was asked for.

    Args:
        family: of its draws: `resample_costs(known=…)` holds them.
        operation: its name in words.
        point: to measure it; the size is rounded up to a whole one.
    """

    family: str
    operation: str
    point: Point


def wanted_by(
    ask: Callable[[Costs], object], profile: Profile, *, allow_modelled: bool = False
) -> tuple[Wanted, ...]:
    """Return what the question asks of the profile's measured operations, in that order.

    Args:
        ask: computes something from nominal costs.
    """
    notes = _Notes()
    ask(_NotingCosts(index_of(profile), notes, allow_modelled=allow_modelled))
    return tuple(notes.wanted)


class _Notes:
    """Operations asked for: at the point of the query that is being answered, and before."""

    def __init__(self) -> None:
        self.point: Point | None = None
        self.wanted: dict[Wanted, None] = {}

    def add(self, name: Name) -> None:
        if self.point is not None:
            one = Wanted(family=name.family, operation=name.operation, point=self.point)
            self.wanted[one] = None


class _NotingCurves(ExactCurves):
    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def named(self, inner: Predictor, name: Name) -> Predictor:
        return _Noting(inner=inner, name=name, notes=self._notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noting:
    inner: Predictor
    name: Name
    notes: _Notes

    def predict(self, size: float) -> Estimate:
        self.notes.add(self.name)
        return self.inner.predict(size)


class _NotingCosts(ProfileCosts):
    """Nominal costs that tell the notes which point answers each query."""

    takes_arrays = False

    def __init__(self, index: ProfileIndex, notes: _Notes, *, allow_modelled: bool) -> None:
        super().__init__(index=index, curves=_NotingCurves(notes), allow_modelled=allow_modelled)
        self._notes = notes

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        self._notes.point = GemmPoint(
            dtype=dtype, product=product, num_experts=num_experts, rows=_whole(rows), d_in=d_in,
            d_out=d_out,
        )  # fmt: skip
        return super().gemm(
            dtype=dtype, product=product, num_experts=num_experts, rows=rows, d_in=d_in,
            d_out=d_out,
        )  # fmt: skip

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        self._notes.point = RowsPoint(op=op, dtype=dtype, rows=_whole(rows), width=width)
        return super().rows_op(op=op, dtype=dtype, rows=rows, width=width)

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        group_size, num_nodes = self._canonical(group_size, num_nodes)
        self._notes.point = CollectivePoint(
            op=op, group_size=group_size, num_bytes=_whole(num_bytes), in_flight=in_flight,
            num_nodes=num_nodes,
        )  # fmt: skip
        return super().collective(
            op=op, group_size=group_size, num_bytes=num_bytes, in_flight=in_flight,
            num_nodes=num_nodes,
        )  # fmt: skip

    def attention(
        self,
        *,
        dtype: str,
        num_sequences: float,
        length: int,
        num_heads: int,
        head_dim: int,
        backward: bool,
    ) -> Estimate | None:
        self._notes.point = AttentionPoint(
            dtype=dtype, num_sequences=_whole(num_sequences), length=length, num_heads=num_heads,
            head_dim=head_dim, backward=backward,
        )  # fmt: skip
        return super().attention(
            dtype=dtype, num_sequences=num_sequences, length=length, num_heads=num_heads,
            head_dim=head_dim, backward=backward,
        )  # fmt: skip

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        self._notes.point = CopyPoint(
            direction=direction, pinned=pinned, num_bytes=_whole(num_bytes)
        )
        return super().copy(direction=direction, pinned=pinned, num_bytes=num_bytes)


def _whole(size: float) -> int:
    """Return the size rounded up, but for what arithmetic on fractions adds."""
    return max(1, math.ceil(size * (1 - 1e-9)))
