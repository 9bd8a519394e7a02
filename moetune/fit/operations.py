"""Predictors of a profile's operations, and of what stands in for those it has not measured."""

import math
from dataclasses import replace

from moetune.domain.cluster import Group
from moetune.domain.costs import Trust, least_trust
from moetune.domain.gemm_forms import GemmForm, even_form
from moetune.domain.layer import ACTIVATIONS
from moetune.domain.samples import CollectiveOp, Direction
from moetune.fit.collectives import Source, name_collective, nearest_source
from moetune.fit.curve import Curve, Line
from moetune.fit.extrapolation import (
    SPREAD_OF_ACTIVATION,
    SPREAD_OF_FORM,
    spread_of_length,
    spread_of_shape,
)
from moetune.fit.gemm import name_attention, name_gemm, nearest_attention, work_ratio
from moetune.fit.index import Points, ProfileIndex
from moetune.fit.missing import copy_name, missing_collective, missing_copy, missing_gemm
from moetune.fit.nodes import rule_of
from moetune.fit.pool import AttentionKey, RowsKey, Shape
from moetune.fit.predictor import (
    Curves,
    FromTable,
    Name,
    Predictor,
    Remembered,
    capped,
    stretched,
)
from moetune.fit.reference import Origin

_BACKWARD = "_backward"


class Operations:
    """Operations of a profile by their names and sizes.

    Args:
        curves: nominal ones, or a random draw.
        allow_modelled: estimate a group that was not measured from the nearest one.
    """

    def __init__(self, *, index: ProfileIndex, curves: Curves, allow_modelled: bool) -> None:
        self._index = index
        self._curves = curves
        self._allow_modelled = allow_modelled
        self._labelled: dict[str, Predictor] = {}
        self._collectives: dict[tuple[str, str, float, Trust], Predictor] = {}

    def gemm_line(self, dtype: str) -> Line | None:
        """Return the dtype's line over MACs; None where measured points predict."""
        line = self._index.gemm_line(dtype)
        return self._curves.line(line, label=f"gemm {dtype}") if line else None

    def gemm(self, dtype: str, product: GemmForm, shape: Shape) -> Predictor:
        """Return the GEMM's times over the rows of one expert.

        Where uneven experts were not measured they take as long as even ones.

        Raises:
            ProfileError: nothing is known about that dtype.
        """
        if (dtype, product) not in self._index.gemm_forms:
            product = even_form(product)
        form = self._form(dtype, product)
        if form is None:
            return self._gemm_line(dtype, shape)
        cap: Trust = "measured" if form == product else "modelled"
        spread = 0.0 if form == product else SPREAD_OF_FORM
        stand_in = "" if form == product else name_gemm(dtype, form, shape)
        curve, found, octaves = self._gemm_curve(dtype, form, shape)
        origin = self._index.tables.gemm.get((dtype, form, shape))
        if octaves is not None:
            origin = self._index.blend_origin(dtype, form)
            surface = self._index.surface(dtype, form)
            cap = least_trust((cap, "extrapolated" if octaves else "interpolated"))
            outside = spread_of_shape(typical_error=surface.shape_error, octaves=octaves)
            spread = math.hypot(spread, outside)
            stand_in = stand_in or ("a blend of smaller and larger ones" if octaves else "")
        return self._finished(
            curve,
            found=found,
            family=self._index.surface(dtype, form).family,
            name=name_gemm(dtype, product, shape),
            unit="rows",
            cap=cap,
            spread=spread,
            stand_in=stand_in,
            origin=origin,
        )

    def _gemm_curve(
        self, dtype: str, form: GemmForm, shape: Shape
    ) -> tuple[Predictor, Points | Curve, float | None]:
        """Return the shape's curve, and what it is from.

        Where it is blended, also its octaves outside the others.
        """
        points = self._index.gemm_points(dtype, form, shape)
        if points is not None:
            return self._curves.through(points), points, None
        surface = self._index.surface(dtype, form)
        blended = surface.blend(shape)
        predictor = self._curves.blend(blended, family=surface.family)
        return predictor, blended, surface.octaves_outside(shape)

    def _form(self, dtype: str, product: GemmForm) -> GemmForm | None:
        """Return the measured form to predict with: the same one, forward, or any even one."""
        forms = [form for one, form in self._index.gemm_forms if one == dtype]
        even = [form for form in forms if form == even_form(form)]
        for wanted in (product, "forward", *even):
            if wanted in forms:
                return wanted
        return None

    def _gemm_line(self, dtype: str, shape: Shape) -> Predictor:
        line = self.gemm_line(dtype)
        if line is None:
            raise missing_gemm(self._index.profile, dtype=dtype, known=self._index.dtypes)
        per_row = replace(line.cost, beta_seconds=line.cost.beta_seconds * math.prod(shape))
        return replace(line, cost=per_row)

    def attention(self, wanted: AttentionKey) -> Predictor | None:
        """Return the times over sequences; None where no attention was measured."""
        known = self._index.pool.attention
        near = wanted if wanted in known else nearest_attention(wanted, known)
        if near is None:
            return None
        found, ratio = self._index.attention(near), work_ratio(wanted, near)
        is_other = near != wanted
        return self._finished(
            stretched(self._curves.through(found), ratio),
            found=found,
            family=found.family,
            name=name_attention(wanted),
            unit="sequences",
            factor=ratio,
            cap="extrapolated" if is_other else "measured",
            spread=spread_of_length(ratio) if is_other else 0.0,
            stand_in=name_attention(near) if is_other else "",
        )

    def rows(self, key: RowsKey) -> Predictor | None:
        """Return a memory-bound operation's times over elements; None where not measured.

        An activation that was not measured takes the times of one that was: they are not nothing.
        """
        near = self._near_rows(key)
        known = None if near is None else self._index.rows(near)
        if near is None or known is None:
            return None
        (op, dtype), is_other = key, near != key
        return self._finished(
            self._predictor(known, f"rows {near}"),
            found=known,
            family=f"rows {near}",
            name=f"{op} in {dtype}",
            unit="elements",
            cap="extrapolated" if is_other else "measured",
            spread=SPREAD_OF_ACTIVATION if is_other else 0.0,
            stand_in=near[0] if is_other else "",
        )

    def _near_rows(self, key: RowsKey) -> RowsKey | None:
        """Return the operation itself, else another activation in the same direction."""
        (op, dtype), known = key, self._index.rows_keys()
        name = op.removesuffix(_BACKWARD)
        if key in known or name not in ACTIVATIONS:
            return key
        others = [f"{one}{op.removeprefix(name)}" for one in reversed(ACTIVATIONS)]
        return next(((one, dtype) for one in others if (one, dtype) in known), None)

    def collective(self, op: CollectiveOp, group: Group, in_flight: int) -> Predictor:
        """Return the collective's times over the input bytes of one rank.

        Numbers in flight that share a source share its predictor, and what that remembers.

        Raises:
            ProfileError: such a group was not measured; the text names the command that does.
        """
        source = self.source(op, group, in_flight)
        if source is None:
            return self._ruled(op, group)
        name = name_collective(op, group, in_flight) if source.spread else source.name
        key = (source.label, name, source.factor, source.cap)
        if key not in self._collectives:
            self._collectives[key] = self._finished(
                stretched(self._predictor(source.found, source.label), source.factor),
                found=source.found,
                family=source.label,
                name=name,
                unit="bytes",
                factor=source.factor,
                cap=source.cap,
                spread=source.spread,
                stand_in=source.name if source.spread else "",
                origin=source.found.origin if isinstance(source.found, Points) else None,
            )
        return self._collectives[key]

    def _ruled(self, op: CollectiveOp, group: Group) -> Predictor:
        """Return the times of a group that is not known, by the profile's rule for more ranks.

        Raises:
            ProfileError: the profile has no such rule, or knows no group of this operation.
        """
        cap: Trust = "modelled"
        key = (f"rule {op} {group}", "", 1.0, cap)
        if key not in self._collectives:
            profile = self._index.profile
            rule = rule_of(
                op,
                group,
                index=self._index,
                predictor=lambda other: self.collective(op, other, 1),
            )
            if rule is None or profile.network is None:
                known = self._index.groups(op)
                raise missing_collective(profile, op=op, group=group, known=known)
            name = Name(
                operation=name_collective(op, group, 1),
                unit="bytes",
                low=0.0,
                high=0.0,
                stand_in=f"the {profile.network.label} rule for more ranks",
            )
            drawn = self._curves.stand_in(rule, spread=profile.network.spread, label=key[0])
            self._collectives[key] = Remembered(self._curves.named(drawn, name))
        return self._collectives[key]

    def source(self, op: CollectiveOp, group: Group, in_flight: int) -> Source | None:
        """Return what a collective is predicted from; None where no known one stands in."""
        if self._index.profile.network is not None and group not in self._index.groups(op):
            return None
        return nearest_source(
            self._index, op, group, in_flight, allow_modelled=self._allow_modelled
        )

    def copy(self, direction: Direction, *, pinned: bool) -> Predictor:
        """Return the copy's times over bytes.

        Raises:
            ProfileError: no such copy was measured.
        """
        alone = (direction, pinned, False)
        known = self._index.copies()
        if alone not in known and self._index.profile.machine.kind == "cpu":
            alone = (direction, not pinned, False)  # both are the same memory
        if alone not in known:
            names = [copy_name(direction=one, pinned=pin) for one, pin, both in known if not both]
            raise missing_copy(self._index.profile, direction=direction, pinned=pinned, known=names)
        found = self._index.copy(alone)
        return self._finished(
            self._predictor(found, f"copy {alone}"),
            found=found,
            family=f"copy {alone}",
            name=f"{copy_name(direction=direction, pinned=alone[1])} copy",
            unit="bytes",
        )

    def _finished(
        self,
        inner: Predictor,
        *,
        found: Points | Curve | Line,
        family: str,
        name: str,
        unit: str,
        factor: float = 1.0,
        cap: Trust = "measured",
        spread: float = 0.0,
        stand_in: str = "",
        origin: Origin | None = None,
    ) -> Predictor:
        """Return the predictor with the error and the trust of a stand-in, and with its name.

        A line is not named, unless it stands in: a profile of lines has measured nothing. Nor is
        what is published in a published profile, which says so as a whole.

        Args:
            found: what it predicts from.
            family: of its draws.
            factor: size of that for one of the wanted operation's.
            spread, stand_in: of what stands in for the operation, and its name.
            origin: of its points from tables; None where there are none.
        """
        if origin is not None:
            drawn = self._curves.stand_in(inner, spread=origin.spread, label=f"{family}: table")
            inner = FromTable(inner=inner, table=drawn, origin=origin)
        if spread:
            label = f"{stand_in} stands in"
            inner = self._curves.stand_in(inner, spread=spread, label=label)
        inner = capped(inner, cap)
        if isinstance(found, Line):
            name_of_line = Name(operation=name, unit=unit, low=0.0, high=0.0, stand_in=stand_in)
            return Remembered(self._curves.named(inner, name_of_line)) if stand_in else inner
        if origin is not None and not stand_in:
            stand_in = origin.words
            if (origin.label, self._index.profile.provenance) == ("published", "published"):
                return Remembered(inner)
        sizes = found.sizes if isinstance(found, Curve) else found.series.sizes
        known = Name(
            operation=name,
            unit=unit,
            low=sizes[0] / factor,
            high=sizes[-1] / factor,
            stand_in=stand_in,
        )
        return Remembered(self._curves.named(inner, known))

    def _predictor(self, found: Points | Line, label: str) -> Predictor:
        """Return the label's only predictor: many numbers in flight share the nearest one."""
        if label not in self._labelled:
            self._labelled[label] = (
                self._curves.line(found, label=label)
                if isinstance(found, Line)
                else self._curves.through(found)
            )
        return self._labelled[label]
