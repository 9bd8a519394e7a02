"""Two plans or two profiles beside each other."""

from collections.abc import Iterator, Sequence

from moetune.domain.document import encode
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.units import format_bytes, format_seconds
from moetune.report import tables
from moetune.report.fits import overlay_picture
from moetune.report.operations import operations_of
from moetune.report.picture import Picture
from moetune.report.tables import Cell, Table
from moetune.workflows.profiles import compare_profiles

_RATES = {"_per_byte": (1e9, "GB"), "_per_mac": (1e12, "TMAC")}


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
    for ending, (factor, name) in _RATES.items():
        if key.endswith(ending):
            return f"{format_seconds(value * factor)} a {name}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _ratio(first: object, second: object) -> Cell:
    numbers = [one for one in (first, second) if isinstance(one, (int, float))]
    if len(numbers) != len((first, second)) or not numbers[0]:
        return Cell(text="")
    return Cell(text=f"{numbers[1] / numbers[0]:.2f} ×", key=numbers[1] / numbers[0])
