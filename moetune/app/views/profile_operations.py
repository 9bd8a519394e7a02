"""Operations of a profile: one of them drawn, all in a table with their errors, and whole steps."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moetune.app.views.words import layer_words
from moetune.domain.document import shown as shortened
from moetune.domain.profile import FitError, Profile
from moetune.domain.records import prediction_error
from moetune.domain.samples import StepRecord
from moetune.domain.units import format_seconds
from moetune.report.fits import fit_figure, residual_figure
from moetune.report.operations import OperationCurve, gemm_line
from moetune.report.section import EMPTY, Cell, Section, Table, without_empty_columns

_RATES = {"bytes": (1e9, "GB/s"), "MACs": (1e12, "TMAC/s"), "elements": (1e9, "G/s")}
_FIRST = "all_to_all"
_MOST_OF_A_KIND = 6
"""A full profile has a hundred shapes of GEMM."""


def operation_to_draw(operations: Sequence[OperationCurve], asked: str) -> OperationCurve | None:
    """Return the operation with that key, else one of those that matter most.

    That is the all-to-all of the most ranks with one in flight, else the first operation.
    """
    keyed = [one for one in operations if one.key == asked]
    exchanges = [one for one in operations if one.name.startswith(_FIRST)]
    alone = [one for one in exchanges if "in flight" not in one.name]
    return next(iter([*keyed, *alone[-1:], *exchanges, *operations]), None)


def fit_section(drawn: OperationCurve | None, *, asked: str) -> Section:
    """Return the figures of one operation.

    Args:
        asked: key of the operation that was asked for; "" for any.
    """
    figures = [] if drawn is None else [fit_figure(drawn), residual_figure(drawn)]
    doubts: tuple[str, ...] = ()
    if asked and (drawn is None or drawn.key != asked):
        instead = "none is drawn" if drawn is None else f"{drawn.name} is drawn instead"
        doubts = (f"This profile has no operation {shortened(asked)}: {instead}.",)
    return Section(
        name="fit", doubts=doubts, figures=tuple(one for one in figures if one is not None)
    )


def fits_section(operations: Sequence[OperationCurve]) -> Section:
    """Return figures of some operations of each kind, for a report, which has no links."""
    kinds = dict.fromkeys(curve.kind for curve in operations)
    some = [
        curve
        for kind in kinds
        for curve in [curve for curve in operations if curve.kind == kind][:_MOST_OF_A_KIND]
    ]
    figures = tuple(replace(fit_figure(curve), name=f"fit-{curve.key}") for curve in some)
    return Section(name="fits", title="Fits", figures=figures)


def operations_section(
    operations: Sequence[OperationCurve],
    profile: Profile,
    *,
    shown: OperationCurve | None = None,
    here: str = "",
) -> Section:
    """Return every operation with its line and its error, the many shapes last.

    Args:
        shown: the one that is drawn.
        here: address to which an operation's key is appended; "" for no links.
    """
    drawn = {one.name for one in operations}
    by_shape = [gemm_line(one) for one in profile.gemm if f"gemm {one.dtype}" not in drawn]
    ordered = sorted(operations, key=lambda one: one.is_shape)
    table = Table(
        name="operations",
        header=("operation", "start-up", "rate", "points", "error", "p95", "quality"),
        rows=(
            *map(_operation, by_shape),
            *(_operation(one, shown=shown, here=here) for one in ordered),
        ),
        wide=("points",),
        empty="The profile has no operations.",
    )
    return Section(name="operations", title="Operations", tables=(without_empty_columns(table),))


def _operation(
    one: OperationCurve, *, shown: OperationCurve | None = None, here: str = ""
) -> tuple[Cell, ...]:
    line = one.line
    is_shown = shown is not None and one.key == shown.key
    return (
        Cell.words(
            one.name,
            href=f"{here}{one.key}#fit" if here else "",
            mark="chosen" if is_shown else "",
        ),
        Cell.seconds(line.alpha_seconds if line else None),
        _rate(line.beta_seconds, one.unit) if line else EMPTY,
        Cell.count(one.num_points) if one.num_points else EMPTY,
        *_errors(one.error),
    )


def _rate(beta_seconds: float, unit: str) -> Cell:
    if unit == "chunks":
        return Cell(text=f"{format_seconds(beta_seconds)} each", value=beta_seconds, unit="s")
    factor, name = _RATES.get(unit, (1.0, ""))
    if not beta_seconds or not name:
        return EMPTY
    return Cell(text=f"{1 / beta_seconds / factor:.3g} {name}", value=1 / beta_seconds)


def _errors(error: FitError | None) -> tuple[Cell, Cell, Cell]:
    if error is None:
        return EMPTY, EMPTY, Cell(text="not known")
    median, p95 = (
        Cell(text=f"{100 * one:{'.3g' if one < 1 else ',.0f'}} %", value=one, unit="1")
        for one in (error.median, error.p95)
    )
    return median, p95, Cell.words(error.quality, mark=error.quality)


def measured_steps(profile: Profile) -> Iterator[Section]:
    """Yield whole steps beside the sums of their operations, by which predictions are corrected."""
    if not profile.steps:
        return
    table = Table(
        name="steps",
        header=("layer", "ranks", "tokens", "chunks", "sum of operations", "measured", "error"),
        rows=tuple(map(_step, profile.steps)),
    )
    yield Section(name="steps", title="Steps of layers", tables=(table,))


def _step(step: StepRecord) -> tuple[Cell, ...]:
    load, summed = step.workload, step.chunks_seconds + step.overhead_seconds
    return (
        Cell.words(layer_words(load.layer)),
        Cell.count(load.world_size),
        Cell.count(load.tokens_per_rank),
        Cell.count(step.degree),
        Cell.seconds(summed),
        Cell.seconds(step.measured_seconds),
        Cell.share(prediction_error(summed, step.measured_seconds), sign=True),
    )
