"""The machines, and one profile."""

import statistics
from collections.abc import Iterable, Sequence

from moetune.domain.records import FitInfo, MachineInfo, Observation, Stored
from moetune.report import section as tables
from moetune.report.observed import (
    WINDOW,
    Seen,
    drift_picture,
    observed_picture,
    rolling_median,
    seen,
)
from moetune.report.section import Cell, Picture, Table
from moetune.service.pages.library import Library, cursor
from moetune.service.pages.sheet import Sheet, address
from moetune.service.pages.shell import age_now
from moetune.workflows.files import bundled_profiles
from moetune.workflows.plan_view import Highlight
from moetune.workflows.profile_view import operations_table, view_profile
from moetune.workflows.report import MOST_OBSERVATIONS

_MOST_MACHINES = 200


def machines_sheet(library: Library) -> Sheet:
    """Return the page of machines and of the profiles measured on them."""
    machines = library.store.machines(limit=_MOST_MACHINES)
    newest = {fit.profile: fit for fit in reversed(library.fits())}
    return Sheet(
        template="machines.html",
        context={
            "title": "Machines",
            "here": "machines",
            "machines": _machines(machines, newest.values()),
            "profiles": _profiles(library, newest),
            "references": _references(library, set(newest)),
        },
    )


def profile_sheet(library: Library, name: str, *, operation: str) -> Sheet:
    """Return the page of one profile.

    Args:
        operation: key of the one whose fit is drawn.

    Raises:
        NotFoundError: there is no such profile.
    """
    view = view_profile(library.profile(name), operation=operation)
    shown = view.shown.key if view.shown else ""
    here = address("profiles", name)
    return Sheet(
        template="profile.html",
        context={
            "title": name,
            "here": "machines",
            "view": view,
            "operations": operations_table(view, here=f"{here}?operation="),
            "document": address("v1", "profiles", name),
            "compare_address": address("compare", what="profiles", first=name),
            "csv": lambda picture: address(
                "profiles", name, f"{picture.name}.csv", operation=shown
            ),
        },
        pictures=view.pictures,
    )


def _machines(machines: Iterable[MachineInfo], fits: Iterable[FitInfo]) -> Table:
    names: dict[int, list[str]] = {}
    for fit in fits:
        names.setdefault(fit.machine_id, []).append(fit.profile)
    return Table(
        name="machines",
        title="Machines",
        header=(
            "device", "kind", "devices", "a node", "memory", "fingerprint", "profiles", "first met",
        ),
        rows=tuple(
            (
                tables.text(one.device),
                tables.text(one.kind.upper()),
                tables.count(one.num_devices),
                tables.count(one.devices_per_node),
                tables.size(one.memory_bytes),
                tables.text(one.hardware_id if one.facts else "not known", mark="code"),
                tables.text(", ".join(names.get(one.id, ())) or "none"),
                Cell(text=age_now(one.created_at)),
            )
            for one in machines
        ),
        right=tables.columns(2, 3, 4),
        empty="No machine was measured yet: run `moetune profile` on one.",
    )  # fmt: skip


def _profiles(library: Library, newest: dict[str, FitInfo]) -> Table:
    fits = sorted(newest.values(), key=lambda fit: fit.id, reverse=True)
    return Table(
        name="profiles",
        title="Profiles",
        header=("profile", "provenance", "machine", "quality", "samples", "fitted"),
        rows=tuple(
            (
                tables.text(fit.profile, href=address("profiles", fit.profile)),
                tables.text(fit.provenance),
                *_quality(library, fit.profile),
                tables.count(fit.num_samples),
                Cell(text=age_now(fit.created_at)),
            )
            for fit in fits
        ),
        right=tables.columns(4),
        empty="None is in the store.",
    )


def _references(library: Library, stored: set[str]) -> Table:
    return Table(
        name="references",
        title="Reference machines",
        header=("profile", "provenance", "machine", "quality", "source"),
        rows=tuple(
            (
                tables.text(name, href=address("profiles", name)),
                tables.text(library.summary(name).provenance),
                *_quality(library, name),
                tables.text(library.summary(name).citation),
            )
            for name in bundled_profiles()
            if name not in stored
        ),
    )


def _quality(library: Library, name: str) -> tuple[Cell, Cell]:
    found = library.summary(name)
    return (
        tables.text(found.scope),
        tables.text(found.quality or "not known", mark=found.quality),
    )


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


def _table(rows: Sequence[Stored[Observation]]) -> Table:
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
