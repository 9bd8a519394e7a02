"""What became of the plans: predicted against observed."""

import statistics
from collections.abc import Sequence

from moetune.domain.records import Kept, Observation
from moetune.report import tables
from moetune.report.observed import (
    WINDOW,
    Seen,
    drift_picture,
    observed_picture,
    rolling_median,
    seen,
)
from moetune.report.picture import Picture
from moetune.report.tables import Cell, Table
from moetune.service.pages.library import Library, cursor
from moetune.service.pages.sheet import Sheet, address
from moetune.workflows.plan_words import Highlight
from moetune.workflows.report import MOST_OBSERVATIONS

PAGE_SIZE = 100


def observed_sheet(library: Library, *, plan: str, after: str) -> Sheet:
    """Return the page of observations.

    Args:
        plan: beginning of a plan's id; "" for all plans, whose steps only their ratios compare.
        after: number of the observation that the table begins below; "" for the newest.

    Raises:
        NotFoundError: there is no such plan.
    """
    plan_id = library.plan(plan).id if plan else None
    kept = library.observations(plan_id)
    found = seen(kept)
    number = cursor(after)
    rows = (
        library.store.observation_page(plan_id, after=number, limit=PAGE_SIZE)
        if number
        else kept[:PAGE_SIZE]
    )
    older = rows[-1].id if len(rows) == PAGE_SIZE else None
    pictures = _pictures(found)
    return Sheet(
        template="observed.html",
        context={
            "title": "Observed",
            "here": "observed",
            "plan": plan_id,
            "highlights": _highlights(found, is_all=len(kept) < MOST_OBSERVATIONS),
            "pictures": pictures,
            "table": _table(rows),
            "newer": address("observed", plan=plan) if number else "",
            "older": address("observed", plan=plan, after=str(older)) if older else "",
            "csv": lambda picture: address("observed", f"{picture.name}.csv", plan=plan),
        },
        pictures=pictures,
    )


def _pictures(found: Sequence[Seen]) -> tuple[Picture, ...]:
    if not found:
        return ()
    if len({one.observation.plan_id for one in found}) > 1:
        return (drift_picture(found),)
    return observed_picture(found), drift_picture(found)


def _highlights(found: Sequence[Seen], *, is_all: bool) -> tuple[Highlight, ...]:
    if not found:
        return ()
    ratios = [one.ratio for one in found]
    misses = [abs(1 / ratio - 1) if ratio else 0.0 for ratio in ratios]
    drift = rolling_median(ratios[-WINDOW:], WINDOW)[-1] - 1
    return (
        Highlight(
            name="Observations",
            value=f"{len(found):,}",
            note="in all" if is_all else "the newest ones",
        ),
        Highlight(
            name="Typical miss",
            value=f"{100 * statistics.median(misses):.1f} %",
            note="median of |predicted / observed − 1|",
        ),
        Highlight(name="Drift", value=f"{100 * drift:+.1f} %", note=f"median of the last {WINDOW}"),
        Highlight(name="Latest", value=found[-1].at[:16].replace("T", " "), note="UTC"),
    )


def _table(rows: Sequence[Kept[Observation]]) -> Table:
    return Table(
        name="observations",
        title="Newest first",
        header=(
            "time, UTC", "plan", "source", "tokens per rank", "chunks", "steps", "predicted",
            "observed", "observed − predicted",
        ),
        rows=tuple(_row(one) for one in reversed(seen(rows))),
        right=tables.columns(3, 5, 6, 7, 8),
        empty="Nothing was observed yet.",
    )  # fmt: skip


def _row(one: Seen) -> tuple[Cell, ...]:
    observation = one.observation
    return (
        tables.text(one.at[:19].replace("T", " ")),
        tables.text(
            observation.plan_id[:6], href=address("plans", observation.plan_id), mark="code"
        ),
        tables.text(observation.source),
        tables.count(observation.tokens_per_rank),
        tables.text(f"{observation.forward_degree} and {observation.backward_degree}"),
        tables.count(len(observation.seconds)),
        tables.seconds(observation.predicted_seconds),
        tables.seconds(one.seconds),
        tables.share(one.ratio - 1, sign=True),
    )
