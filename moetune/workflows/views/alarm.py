"""The drift alarm as a section: a sentence and a row for each series."""

from collections.abc import Sequence

from moetune.report.section import EMPTY, Cell, Section, Table, sentence
from moetune.workflows.alarm import WatchedSeries

_MOST_SENTENCES = 6
_MOST_SERIES = 200
_NOTE = (
    "times: of steps, or of an operation beside the phase's others. compared with: the median of "
    "the first times, or of those since the last change. sum: of how far times are beyond the "
    "band, each bounded; at 100 % a change is certain."
)


def alarm_section(series: Sequence[WatchedSeries], *, plans: str = "") -> Section:
    """Return what the alarm thinks, in sentences where all series are of one plan.

    Args:
        plans: address to which a plan's id is appended; "" for no links.
    """
    is_one = len({one.plan_id for one in series}) == 1
    table = Table(
        name="alarm",
        header=(
            "plan", "phase", "times of", "source", "times", "compared with", "now", "sum", "state",
        ),
        rows=tuple(_row(one, plans) for one in series[:_MOST_SERIES]),
        notes=(_NOTE,),
        empty="Nothing was observed yet.",
    )  # fmt: skip
    return Section(
        name="alarm",
        title="As the alarm sees it",
        paragraphs=tuple(sentence(one.words) for one in series[:_MOST_SENTENCES] if is_one),
        tables=(table,),
    )


def _row(one: WatchedSeries, plans: str) -> tuple[Cell, ...]:
    last = one.states[-1]
    href = f"{plans}{one.plan_id}" if plans else ""
    return (
        Cell(text=one.plan_id[:6], value=one.plan_id, href=href, mark="code"),
        Cell.words(one.phase),
        Cell.words("steps" if one.phase == "step" else one.name),
        Cell.words(one.source),
        Cell.count(len(one.states)),
        Cell.seconds(last.before_seconds),
        Cell.seconds(last.seconds),
        EMPTY if last.before_seconds is None else Cell.share(one.share, digits=0),
        _state(one),
    )


def _state(one: WatchedSeries) -> Cell:
    change = one.last_change
    if change is not None and change.drift is not None:
        return Cell.words(f"changed to {change.drift.factor:.2f} ×", mark="suspect")
    if one.states[-1].band_seconds is None:
        return Cell.words("learning")
    return Cell.words("unchanged", mark="good")
