"""A profile as the costs that the solvers read: the last step from samples to a plan's times."""

import math
from dataclasses import replace
from typing import get_args

from moetune.domain.cluster import Group, canonical
from moetune.domain.costs import (
    CopyMode,
    Costs,
    Estimate,
    Interference,
    LinearCost,
    OverlapSpeeds,
    Trust,
    least_trust,
)
from moetune.domain.profile import Profile
from moetune.domain.samples import CollectiveOp, Direction, GemmForm
from moetune.fit.collectives import Source, nearest_source
from moetune.fit.corrections import corrected
from moetune.fit.curve import Line
from moetune.fit.gemm import nearest_attention, work_ratio
from moetune.fit.index import (
    Points,
    ProfileIndex,
    copy_name,
    missing_collective,
    missing_copy,
    missing_gemm,
)
from moetune.fit.pool import AttentionKey, CollectiveKey, RowsKey, Shape
from moetune.fit.predictor import Curves, ExactCurves, Predictor, capped, stretched

_FREE = Estimate(seconds=0.0, trust="measured")


def costs_of(profile: Profile, *, allow_modelled: bool = False) -> Costs:
    """Return the costs that the profile's samples, or else its lines, predict, with corrections.

    Args:
        allow_modelled: estimate a group that was not measured from the nearest one.
    """
    measured = ProfileCosts(
        index=ProfileIndex(profile), curves=ExactCurves(), allow_modelled=allow_modelled
    )
    return corrected(measured, profile.corrections)


class ProfileCosts:
    """Predictions from one profile (`domain.costs.Costs`).

    Predictors are cached by operation: a repeated query costs a dictionary access and a
    bisection. Not safe for several threads.
    """

    def __init__(self, *, index: ProfileIndex, curves: Curves, allow_modelled: bool) -> None:
        self._index = index
        self._curves = curves
        self._allow_modelled = allow_modelled
        self._gemms: dict[tuple[str, GemmForm, int, int, int], Predictor] = {}
        self._collectives: dict[CollectiveKey, Predictor] = {}
        self._copies: dict[tuple[Direction, bool], Predictor] = {}
        self._labelled: dict[str, Predictor] = {}
        self._rows: dict[RowsKey, Predictor | None] = {}
        self._attention: dict[AttentionKey, Predictor | None] = {}

    @property
    def interference(self) -> Interference:
        """Speed of each class while others run."""
        return self._curves.interference(self._index)

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return the speeds of computation and of exchanges of that size.

        They are the table's where sizes were not measured, or the table was set by hand.
        """
        comp, comm = self._index.comp_loss, self._index.comm_loss
        table = self.interference
        return OverlapSpeeds(
            comp=table.comp.comm if comp is None else comp.speed(exchange_bytes, exchange_seconds),
            comm=table.comm.comp
            if comm is None
            else comm.stretched_speed(exchange_bytes, exchange_seconds),
        )

    def burst_seconds(self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0) -> float:
        """Return the link time by which collectives are ahead after a pause; 0 for none known."""
        return self._index.bursts.get((op, self._canonical(group_size, num_nodes)), 0.0)

    def gemm_line(self, *, dtype: str) -> LinearCost | None:
        """Return the α–β line over MACs; None where measured points predict."""
        line = self._index.gemm_line(dtype)
        return self._curves.line(line, label=f"gemm {dtype}").cost if line else None

    def collective_line(
        self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0
    ) -> LinearCost | None:
        """Return the α–β line over bytes; None where measured points predict."""
        if group_size == 1:
            return None
        source = self._source(op, self._canonical(group_size, num_nodes), 1)
        if source is None or not isinstance(source.found, Line):
            return None
        cost = self._curves.line(source.found, label=source.label).cost
        return replace(cost, beta_seconds=source.factor * cost.beta_seconds)

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        """Return the time of one GEMM of `num_experts` experts with `rows` rows each.

        A measured shape is interpolated over its rows; another shape is blended from the
        measured ones (`fit.gemm.Surface`). A form that was not measured takes the time of
        the forward form, labelled "modelled".

        Raises:
            ProfileError: nothing is known about that dtype.
        """
        key = (dtype, product, num_experts, d_in, d_out)
        found = self._gemms.get(key)
        if found is None:
            found = self._gemms[key] = self._gemm(dtype, product, (num_experts, d_in, d_out))
        return found.predict(rows)

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        """Return the time of a memory-bound operation; None where it was not measured."""
        key = (op, dtype)
        if key not in self._rows:
            known = self._index.rows(key)
            self._rows[key] = None if known is None else self._predictor(known, f"rows {key}")
        found = self._rows[key]
        return found.predict(rows * width) if found else None

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        """Return the time of one collective; 0 in a group of one.

        A number in flight that was not measured takes the nearest one: "interpolated" at best
        where both are above 1, else "extrapolated" at best.

        Raises:
            ProfileError: such a group was not measured; the text names the command that does.
        """
        if group_size == 1:
            return _FREE
        key = (op, group_size, num_nodes, in_flight)
        found = self._collectives.get(key)
        if found is None:
            group = self._canonical(group_size, num_nodes)
            found = self._collectives[key] = self._collective(op, group, in_flight)
        return found.predict(num_bytes)

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
        """Return the time of causal self-attention; None where it was not measured.

        Another length or number of heads takes the nearest measured one at as much work,
        labelled "extrapolated".
        """
        key = (dtype, length, num_heads, head_dim, backward)
        if key not in self._attention:
            self._attention[key] = self._attention_like(key)
        found = self._attention[key]
        return found.predict(num_sequences) if found else None

    @property
    def copy_mode(self) -> CopyMode | None:
        """How activations are offloaded; None where copies were not measured both ways."""
        known = {
            pinned: {way for way, how, both in self._index.copies() if how == pinned and not both}
            for pinned in (True, False)
        }
        modes: tuple[CopyMode, CopyMode] = ("pinned", "pageable")
        if self._index.profile.machine.kind == "cpu":
            modes = ("inline", "inline")
        for mode, pinned in zip(modes, (True, False), strict=True):
            if len(known[pinned]) == len(get_args(Direction)):
                return mode
        return None

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        """Return the time of one copy while none runs the other way.

        Raises:
            ProfileError: no such copy was measured.
        """
        key = (direction, pinned)
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = self._copy(direction, pinned)
        return found.predict(num_bytes)

    def _gemm(self, dtype: str, product: GemmForm, shape: Shape) -> Predictor:
        form = self._form(dtype, product)
        if form is None:
            return self._gemm_line(dtype, shape)
        cap: Trust = "measured" if form == product else "modelled"
        points = self._index.gemm_points(dtype, form, shape)
        if points is not None:
            return capped(self._curves.through(points), cap)
        surface = self._index.surface(dtype, form)
        near: Trust = "interpolated" if surface.covers(shape) else "extrapolated"
        curve = self._curves.blend(surface.blend(shape), family=surface.family)
        return capped(curve, least_trust((cap, near)))

    def _form(self, dtype: str, product: GemmForm) -> GemmForm | None:
        """Return the measured form to predict with: the same one, forward, or any."""
        forms = [form for one, form in self._index.gemm_forms if one == dtype]
        for wanted in (product, "forward", *forms):
            if wanted in forms:
                return wanted
        return None

    def _gemm_line(self, dtype: str, shape: Shape) -> Predictor:
        cost = self.gemm_line(dtype=dtype)
        line = self._index.gemm_line(dtype)
        if cost is None or line is None:
            raise missing_gemm(self._index.profile, dtype=dtype, known=self._index.dtypes)
        per_row = LinearCost(
            alpha_seconds=cost.alpha_seconds, beta_seconds=cost.beta_seconds * math.prod(shape)
        )
        return Line(cost=per_row, relative_error=line.relative_error)

    def _attention_like(self, wanted: AttentionKey) -> Predictor | None:
        known = self._index.pool.attention
        if wanted in known:
            return self._curves.through(self._index.attention(wanted))
        near = nearest_attention(wanted, known)
        if near is None:
            return None
        curve = self._curves.through(self._index.attention(near))
        return capped(stretched(curve, work_ratio(wanted, near)), "extrapolated")

    def _canonical(self, group_size: int, num_nodes: int) -> Group:
        return canonical((group_size, num_nodes), self._index.profile.machine)

    def _collective(self, op: CollectiveOp, group: Group, in_flight: int) -> Predictor:
        source = self._source(op, group, in_flight)
        if source is None:
            known = self._index.groups(op)
            raise missing_collective(self._index.profile, op=op, group=group, known=known)
        found = self._predictor(source.found, source.label)
        return capped(stretched(found, source.factor), source.cap)

    def _source(self, op: CollectiveOp, group: Group, in_flight: int) -> Source | None:
        return nearest_source(
            self._index, op, group, in_flight, allow_modelled=self._allow_modelled
        )

    def _copy(self, direction: Direction, pinned: bool) -> Predictor:  # noqa: FBT001 - private
        alone = (direction, pinned, False)
        known = self._index.copies()
        if alone not in known and self._index.profile.machine.kind == "cpu":
            alone = (direction, not pinned, False)  # both are the same memory
        if alone not in known:
            names = [copy_name(direction=one, pinned=pin) for one, pin, both in known if not both]
            raise missing_copy(self._index.profile, direction=direction, pinned=pinned, known=names)
        return self._predictor(self._index.copy(alone), f"copy {alone}")

    def _predictor(self, found: Points | Line, label: str) -> Predictor:
        """Return the label's only predictor: many numbers in flight share the nearest one."""
        if label not in self._labelled:
            self._labelled[label] = (
                self._curves.line(found, label=label)
                if isinstance(found, Line)
                else self._curves.through(found)
            )
        return self._labelled[label]
