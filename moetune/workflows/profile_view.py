"""A profile as readers see it, on a page or in a file: words, figures and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.profile import FitError, Profile
from moetune.domain.units import format_bytes
from moetune.report import tables
from moetune.report.fits import fit_picture, residual_picture
from moetune.report.interference import interference_picture
from moetune.report.operations import Operation, operations_of
from moetune.report.picture import Picture
from moetune.report.tables import Cell, Table
from moetune.workflows.profiles import FoundProfile

_FIRST = "all_to_all"
_RATES = {"bytes": (1e9, "GB/s"), "MACs": (1e12, "TMAC/s")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileView:
    """A profile with everything that is shown of it.

    Args:
        shown: the operation whose fit is drawn; None where the profile knows of none.
        scope: the machine in one line.
        digest: of the profile.
        suspects: samples that vary too much.
    """

    profile: Profile
    digest: str
    scope: str
    suspects: int
    operations: tuple[Operation, ...]
    shown: Operation | None
    pictures: tuple[Picture, ...]
    facts: tuple[Table, ...]


def view_profile(found: FoundProfile, *, operation: str = "") -> ProfileView:
    """Return a profile's view with one operation drawn.

    Args:
        operation: its key; where there is none such, the all-to-all of the most ranks is drawn,
            else the first operation.
    """
    profile = found.profile
    operations = operations_of(profile)
    shown = next((one for one in operations if one.key == operation), None) or _first(operations)
    fits = (fit_picture(shown), residual_picture(shown)) if shown else ()
    return ProfileView(
        profile=profile,
        digest=found.digest,
        scope=machine_scope(profile),
        suspects=sum(sample.quality == "suspect" for sample in profile.samples),
        operations=operations,
        shown=shown,
        pictures=(
            *(one for one in fits if one is not None),
            interference_picture(profile.interference),
        ),
        facts=tuple(_facts(profile)),
    )


def operations_table(view: ProfileView, *, here: str = "") -> Table:
    """Return the operations with their lines and errors.

    Args:
        here: address that an operation's key is added to; "" for no links.
    """
    return Table(
        name="operations",
        title="Operations",
        header=("operation", "start-up", "rate", "points", "median error", "p95 error", "quality"),
        rows=tuple(_operation_row(one, view, here) for one in view.operations),
        right=tables.columns(1, 2, 3, 4, 5),
        empty="The profile knows the time of nothing.",
    )


def machine_scope(profile: Profile) -> str:
    """Return "64 × NVIDIA H200, 8 a node, 141 GiB each"."""
    machine = profile.machine
    return (
        f"{machine.num_devices:,} × {machine.device}, {machine.devices_per_node} a node, "
        f"{format_bytes(machine.memory_bytes)} each"
    )


def worst_quality(profile: Profile) -> str:
    """Return the worst label of the profile's fits; "" where no error is known."""
    errors = [
        *(line.error for line in profile.gemm),
        *(line.error for line in profile.collective),
        *(line.error for line in profile.copy),
    ]
    labels = {error.quality for error in errors if error is not None}
    return next((label for label in ("suspect", "usable", "good") if label in labels), "")


def _first(operations: Sequence[Operation]) -> Operation | None:
    """Return the exchange of the most ranks, alone; without one, whatever comes first."""
    exchanges = [one for one in operations if one.name.startswith(_FIRST)]
    alone = [one for one in exchanges if "in flight" not in one.name]
    return next(iter([*alone[-1:], *exchanges, *operations]), None)


def _operation_row(one: Operation, view: ProfileView, here: str) -> tuple[Cell, ...]:
    error, line = one.error, one.line
    factor, unit = _RATES.get(one.unit, (1.0, ""))
    rate = 1 / line.beta_seconds if line and line.beta_seconds and unit else None
    is_shown = view.shown is not None and one.key == view.shown.key
    return (
        tables.text(
            one.name, href=f"{here}{one.key}#fit" if here else "", mark="chosen" if is_shown else ""
        ),
        tables.seconds(line.alpha_seconds if line else None),
        Cell(text=f"{rate / factor:.3g} {unit}", key=rate) if rate else Cell(text=""),
        tables.count(one.num_points),
        *_errors(error),
    )


def _errors(error: FitError | None) -> tuple[Cell, Cell, Cell]:
    if error is None:
        return tables.text(""), tables.text(""), tables.text("not known")
    return (
        tables.share(error.median),
        tables.share(error.p95),
        tables.text(error.quality, mark=error.quality),
    )


def _facts(profile: Profile) -> Iterator[Table]:
    found = profile.fingerprint
    if found.hardware:
        rows = sorted(found.hardware.items())
        yield tables.facts(f"Hardware {found.hardware_id}", rows, name="hardware")
    if found.software:
        yield tables.facts("Software", sorted(found.software.items()), name="software")
