"""The machines, and one profile."""

from collections.abc import Iterable

from moetune.domain.records import FitInfo, MachineInfo
from moetune.report import tables
from moetune.report.tables import Cell, Table
from moetune.service.pages.library import Library
from moetune.service.pages.sheet import Sheet, address
from moetune.service.pages.shell import age_now
from moetune.workflows.files import bundled_profiles
from moetune.workflows.profile_view import operations_table, view_profile

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
