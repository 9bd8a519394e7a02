"""A profile as readers see it, on a page or in a file: words, figures and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.document import encode
from moetune.domain.plan import Plan
from moetune.domain.profile import FitError, Profile
from moetune.domain.units import format_bytes, format_seconds
from moetune.report import section as tables
from moetune.report.fits import fit_picture, overlay_picture, residual_picture
from moetune.report.operations import OperationCurve, interference_picture, operations_of
from moetune.report.section import Cell, Picture, Table
from moetune.workflows.profiles import FoundProfile, compare_profiles

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
    operations: tuple[OperationCurve, ...]
    shown: OperationCurve | None
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


def _first(operations: Sequence[OperationCurve]) -> OperationCurve | None:
    """Return the exchange of the most ranks, alone; without one, whatever comes first."""
    exchanges = [one for one in operations if one.name.startswith(_FIRST)]
    alone = [one for one in exchanges if "in flight" not in one.name]
    return next(iter([*alone[-1:], *exchanges, *operations]), None)


def _operation_row(one: OperationCurve, view: ProfileView, here: str) -> tuple[Cell, ...]:
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


_RATES_COMPARISON = {"_per_byte": (1e9, "GB"), "_per_mac": (1e12, "TMAC")}


def compare_plans(first: Plan, second: Plan, *, names: tuple[str, str]) -> Table:
    """Return every field of the plan documents in which the two differ, but for what lost.

    Args:
        names: what the columns are called.
    """
    left, right = (dict(_fields(plan)) for plan in (first, second))
    keys = list(dict.fromkeys([*left, *right]))
    return _differences(
        [(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)],
        names=names,
    )


def compare_machines(first: Profile, second: Profile) -> Table:
    """Return every number and fact in which two profiles differ."""
    found = [(one.key, one.first, one.second) for one in compare_profiles(first, second)]
    return _differences(found, names=(first.name, second.name))


def overlays(first: Profile, second: Profile, *, most: int = 6) -> tuple[Picture, ...]:
    """Return the operations that both profiles know, one figure each, travel first."""
    theirs = {one.name: one for one in operations_of(second)}
    both = [(one, theirs[one.name]) for one in operations_of(first) if one.name in theirs]
    names = (first.name, second.name)
    alike = [pair for pair in both if pair[0].unit == pair[1].unit]
    return tuple(overlay_picture(*pair, names) for pair in alike[:most])


def _fields(plan: Plan) -> Iterator[tuple[str, object]]:
    document = encode(plan)
    for part in ("inputs", "layout", "pipeline", "memory", "chunks", "predicted", "transformer"):
        yield from _flat(part, document[part])
    verdict = document["decision"]
    for key in ("probability_best", "expected_regret", "binding"):
        yield f"decision.{key}", verdict[key]


def _flat(where: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(f"{where}.{key}", item)
    elif isinstance(value, list):
        yield where, f"{len(value)} entries" if where.endswith(("ranges", "parts")) else str(value)
    else:
        yield where, value


def _differences(found: Sequence[tuple[str, object, object]], *, names: tuple[str, str]) -> Table:
    return Table(
        name="differences",
        title="What differs",
        header=("", *names, "ratio"),
        rows=tuple(
            (
                tables.text(key, mark="code"),
                _value(key, first),
                _value(key, second),
                _ratio(first, second),
            )
            for key, first, second in found
        ),
        right=tables.columns(1, 2, 3),
        empty="Nothing: they say the same.",
    )


def _value(key: str, value: object) -> Cell:
    if value is None:
        return tables.text("–")
    if key.endswith("_fingerprint"):
        return tables.text(str(value)[:12], mark="code")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return tables.text(str(value))
    return Cell(text=_number(key, value), key=value)


def _number(key: str, value: float) -> str:
    """Return a number in the unit that its key ends with."""
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key.endswith("_seconds"):
        return format_seconds(value)
    for ending, (factor, name) in _RATES_COMPARISON.items():
        if key.endswith(ending):
            return f"{format_seconds(value * factor)} a {name}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _ratio(first: object, second: object) -> Cell:
    numbers = [one for one in (first, second) if isinstance(one, (int, float))]
    if len(numbers) != len((first, second)) or not numbers[0]:
        return Cell(text="")
    return Cell(text=f"{numbers[1] / numbers[0]:.2f} ×", key=numbers[1] / numbers[0])
