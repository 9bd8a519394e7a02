"""The source that predicts each operation of a profile: its measurements, or a stand-in."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.cluster import canonical
from moetune.domain.cost_keys import (
    AttentionKey,
    CollectiveKey,
    CopyKey,
    CostKey,
    GemmKey,
    RowsKey,
    unit_of,
)
from moetune.domain.costs import Doubt, Estimate, Trust, least_trust
from moetune.domain.interference import SpeedTable
from moetune.domain.layer import ACTIVATIONS
from moetune.domain.once import Tables, once
from moetune.domain.samples import GemmForm, even_form
from moetune.fit.collectives import nearest_collective, rule_of
from moetune.fit.curve import Curve, Line, Times, curve_through
from moetune.fit.extrapolation import (
    SPREAD_OF_ACTIVATION,
    SPREAD_OF_FORM,
    spread_of_length,
    spread_of_shape,
)
from moetune.fit.index import Basis, Blend, Points, ProfileIndex, Source
from moetune.fit.interference import speeds_of
from moetune.fit.missing import missing_collective, missing_copy, missing_gemm
from moetune.fit.pool import Origin

_UNIT_FACTOR = np.ones((1, 1))


class Curves:
    """Source of nominal curves: all times as they were measured or published."""

    def speeds(self, index: ProfileIndex) -> SpeedTable:
        """Return the profile's interference factors as speeds."""
        return speeds_of(index.profile.interference)

    def times(self, basis: Basis) -> Curve | Line:
        """Return the curve through the points, the curve of a blend, or the line."""
        match basis:
            case Points():
                return curve_through(
                    sizes=basis.series.sizes,
                    seconds=basis.series.medians,
                    alpha_seconds=basis.alpha_seconds,
                    relative_error=basis.relative_error,
                )
            case Blend():
                return basis.curve
            case Line():
                return basis

    def factors(self, label: str, spread: float) -> Floats:  # noqa: ARG002 - draws differ
        """Return the factors on times that have an additional error, shape (curves, 1); here 1."""
        return _UNIT_FACTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Times of one operation, with the trust in them.

    Args:
        key: the operation, as doubts name it; None if doubts do not name it.
        stretch: size on the curve for each unit of the operation's size.
        factors: on the times of a stand-in, shape (curves, 1).
        stand_in: name of the stand-in; "" for the operation itself.
        origin: table of the points; None if no point comes from a table.
        table_factors: on the times that come from the table.
    """

    key: CostKey | None
    times: Times
    stretch: float = 1.0
    factors: Floats
    cap: Trust
    stand_in: str
    origin: Origin | None = None
    table_factors: Floats = field(default_factory=lambda: _UNIT_FACTOR)

    def seconds_at(self, sizes: Floats) -> Floats:
        """Return the times at some sizes, shape (curves, sizes)."""
        seconds = self.factors * self.times.seconds_at(self.stretch * sizes)
        if self.origin is None or self.table_factors is _UNIT_FACTOR:
            return seconds
        is_sample = (self.origin.low <= sizes) & (sizes <= self.origin.high)
        return np.where(is_sample, seconds, self.table_factors * seconds)

    def trust(self, size: float) -> Trust:
        """Return the trust in the time at a size; a line or a rule counts as "modelled"."""
        is_table = self.origin is not None and self.origin.covers(size)
        if is_table or not isinstance(self.times, Curve):
            return "modelled"
        return least_trust((self.times.trust(self.stretch * size), self.cap))

    def estimate(self, size: float) -> Estimate[float]:
        """Return the time of a single curve at a single size."""
        trust = self.trust(size)
        seconds = self.seconds_at(np.array([size])).item()
        if self.key is None or trust in {"measured", "interpolated"}:
            return Estimate(seconds=seconds, trust=trust)
        return Estimate(seconds=seconds, trust=trust, doubts=(self._doubt(self.key, size),))

    def _doubt(self, key: CostKey, size: float) -> Doubt:
        doubt = Doubt(operation=key.words, size=size, unit=unit_of(key), stand_in=self.stand_in)
        if self.stand_in or not isinstance(self.times, Curve):
            return doubt
        measured = self.times.sizes[0] / self.stretch
        return doubt._replace(low=float(measured[0]), high=float(measured[-1]))


_BACKWARD = "_backward"


@dataclass(frozen=True, kw_only=True, eq=False)
class Operations(Tables):
    """Predictors of a profile's operations.

    Args:
        curves: nominal curves, or random draws.
    """

    index: ProfileIndex
    curves: Curves
    allow_modelled: bool

    @once(lambda key: key)
    def predictor(self, key: CostKey) -> Predictor | None:
        """Return the operation's predictor; None for unknown rows or attention, or ProfileError."""
        if isinstance(key, CollectiveKey):
            key = key._replace(num_nodes=canonical(key.group, self.index.profile.machine)[1])
        source = self.source(key)
        if source is not None:
            return self._predictor(key, source)
        return self._predict_by_rule(key) if isinstance(key, CollectiveKey) else None

    def source(self, key: CostKey) -> Source | None:
        """Return an operation's source; None if unknown, ProfileError for a copy or a dtype."""
        match key:
            case GemmKey():
                return self._gemm(key)
            case RowsKey():
                return self._rows(key)
            case CollectiveKey():
                return self._collective(key)
            case CopyKey():
                return self._copy(key)
            case AttentionKey():
                return self._attention(key)

    def _gemm(self, key: GemmKey) -> Source:
        """Return the GEMM's source over rows; even experts may stand in for uneven experts.

        A measured shape is interpolated over its rows. Another shape is blended from measured
        shapes (`fit.gemm.Surface`). A form that was not measured takes the time of the forward form
        and is labelled "modelled".
        """
        if (key.dtype, key.product, key.kernel) not in self.index.gemm_forms:
            key = key._replace(product=even_form(key.product))
        form = self._form(key)
        if form is None:
            line = None if key.kernel else self.index.gemm_line(key.dtype)
            if line is None:
                dtypes = self.index.dtypes
                raise missing_gemm(self.index.profile, dtype=key.dtype, measured=dtypes)
            return Source(key=key, basis=line, stretch=math.prod(key.shape))
        near, is_other = key._replace(product=form), form != key.product
        cap: Trust = "modelled" if is_other else "measured"
        spread = SPREAD_OF_FORM if is_other else 0.0
        stand_in = near.words if is_other else ""
        points = self.index.gemm_points(near)
        if points is not None:
            return Source(key=key, basis=points, cap=cap, spread=spread, stand_in=stand_in)
        surface = self.index.surface(key.dtype, form, key.kernel)
        octaves = surface.octaves_outside(key.shape)
        outside = spread_of_shape(typical_error=surface.shape_error, octaves=octaves)
        return Source(
            key=key,
            basis=self.index.gemm_blend(near),
            cap=least_trust((cap, "extrapolated" if octaves else "interpolated")),
            spread=math.hypot(spread, outside),
            stand_in=stand_in or ("a blend of smaller and larger ones" if octaves else ""),
        )

    def _form(self, key: GemmKey) -> GemmForm | None:
        """Return the measured form that predicts: the wanted form, forward, or any even form."""
        wanted = key.dtype, key.kernel
        forms = [form for dtype, form, kernel in self.index.gemm_forms if (dtype, kernel) == wanted]
        even = (form for form in forms if form == even_form(form))
        return next((form for form in (key.product, "forward", *even) if form in forms), None)

    def _rows(self, key: RowsKey) -> Source | None:
        """Return a memory-bound operation; another activation may stand in, in its direction."""
        basis, name = self.index.basis(key), key.op.removesuffix(_BACKWARD)
        if basis is not None:
            return Source(key=key, basis=basis)
        if name not in ACTIVATIONS:
            return None
        for activation in reversed(ACTIVATIONS):
            near = key._replace(op=f"{activation}{key.op.removeprefix(name)}")
            basis = self.index.basis(near)
            if basis is not None:
                return Source(
                    key=near, basis=basis, cap="extrapolated", spread=SPREAD_OF_ACTIVATION,
                    stand_in=near.op,
                )  # fmt: skip
        return None

    def _collective(self, key: CollectiveKey) -> Source | None:
        """Return the nearest collective; None leaves the group to the rule, if the profile has it.

        The nearest number in flight stands in for an unmeasured number. The trust is "interpolated"
        at best if both are above 1, else "extrapolated" at best.
        """
        groups = self.index.groups(key.op)
        if self.index.profile.network is not None and key.group not in groups:
            return None
        return nearest_collective(self.index, key, allow_modelled=self.allow_modelled)

    def _attention(self, key: AttentionKey) -> Source | None:
        """Return attention of that shape, else of the nearest known shape scaled to equal work."""
        shapes = self.index.keys(AttentionKey)
        near = key if key in shapes else nearest_attention(key, shapes)
        basis = None if near is None else self.index.basis(near)
        if near is None or basis is None:
            return None
        if near == key:
            return Source(key=key, basis=basis)
        ratio = work_ratio(key, near)
        return Source(
            key=near, basis=basis, stretch=ratio, cap="extrapolated",
            spread=spread_of_length(ratio), stand_in=near.words,
        )  # fmt: skip

    def _copy(self, key: CopyKey) -> Source:
        """Return the copy; on a CPU pinned and pageable memory are the same."""
        near, profile = key, self.index.profile
        if self.index.basis(near) is None and profile.machine.kind == "cpu":
            near = key._replace(pinned=not key.pinned)
        basis = self.index.basis(near)
        if basis is None:
            alone = [copy.name for copy in self.index.keys(CopyKey) if not copy.both_ways]
            raise missing_copy(profile, copy=key, measured=alone)
        return Source(key=near, basis=basis)

    def _predict_by_rule(self, key: CollectiveKey) -> Predictor:
        """Return an unknown group's times by the profile's rule; ProfileError without a rule."""
        profile, alone = self.index.profile, key._replace(in_flight=1)
        rule = rule_of(alone, index=self.index, predictor=self._known_predictor)
        if rule is None or profile.network is None:
            groups = self.index.groups(key.op)
            raise missing_collective(profile, op=key.op, group=key.group, measured=groups)
        label = f"rule {key.op} {key.group}"
        return Predictor(
            key=alone,
            times=rule,
            factors=self.curves.factors(label, profile.network.spread),
            cap="modelled",
            stand_in=f"the {profile.network.label} rule for more ranks",
        )

    def _known_predictor(self, key: CollectiveKey) -> Predictor:
        """Return the predictor of a known collective that the rule starts from."""
        predictor = self.predictor(key)
        assert predictor is not None  # noqa: S101 - collectives are known, or an error
        return predictor

    def _predictor(self, key: CostKey, source: Source) -> Predictor:
        """Return the predictor with the error and the trust of a stand-in.

        Doubts name a line only if it stands in, because a profile of lines has measured nothing.
        They do not name published times in a published profile, whose provenance says so as a
        whole.
        """
        basis, stand_in = source.basis, source.stand_in
        origin, table_factors = None, _UNIT_FACTOR
        is_named = bool(stand_in) or not isinstance(basis, Line)
        if not isinstance(basis, Line) and basis.origin is not None:
            origin = basis.origin
            table_factors = self.curves.factors(f"{basis.family}: table", origin.spread)
            if not stand_in:
                stand_in = origin.words
                published = origin.label, self.index.profile.provenance
                is_named = published != ("published", "published")
        named, times = key if source.stand_in else source.key, self.curves.times
        return Predictor(
            key=named if is_named else None,
            # Several numbers in flight share the points of the nearest number.
            times=self.remembered(basis.label, lambda: times(basis))
            if isinstance(basis, Points)
            else times(basis),
            stretch=source.stretch,
            factors=self.curves.factors(f"{source.stand_in} stands in", source.spread),
            cap=source.cap,
            stand_in=stand_in,
            origin=origin,
            table_factors=table_factors,
        )


def nearest_attention(wanted: AttentionKey, shapes: Iterable[AttentionKey]) -> AttentionKey | None:
    """Return the known shape nearest by ratio in length, then in heads; the smaller if they tie."""

    def distance(key: AttentionKey) -> tuple[float, ...]:
        _, *there, _ = key
        return (*(abs(math.log(a / b)) for a, b in zip(there, wanted[1:-1], strict=True)), *there)

    same = (key for key in shapes if (key[0], key[-1]) == (wanted[0], wanted[-1]))
    return min(same, key=distance, default=None)


def work_ratio(wanted: AttentionKey, near: AttentionKey) -> float:
    """Return the known shape's sequences per wanted sequence, by length² · heads · head_dim."""
    widths = (key.num_heads * key.head_dim for key in (wanted, near))
    return (wanted.length / near.length) ** 2 * next(widths) / next(widths)
