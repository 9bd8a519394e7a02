"""A profile as sections: its machine, quality, operations, sources and interference."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.app.profiles import ProfileInfo, ResolvedProfile
from moetune.domain.cluster import DEVICE_MEMORY
from moetune.domain.cost_keys import (
    AttentionKey,
    CollectiveKey,
    CopyKey,
    CostKey,
    GemmKey,
    RowsKey,
    unit_of,
)
from moetune.domain.costs import LinearCost
from moetune.domain.profile import FitError, GemmLine, Profile
from moetune.domain.records import prediction_error
from moetune.domain.reference import CollectiveTable, DispatcherTable, GemmTable
from moetune.domain.reference import Table as DataTable
from moetune.domain.samples import LAUNCHES, StepRecord
from moetune.domain.site import site_of
from moetune.domain.units import format_bytes, format_seconds, format_share
from moetune.fit.index import ProfileIndex, index_of
from moetune.fit.interference import speeds_of
from moetune.fit.missing import group_name, launcher
from moetune.fit.quality import quality_of
from moetune.report.plan_figures import CLASSES
from moetune.report.section import EMPTY, Cell, Section, Table, facts, plural, without_empty_columns
from moetune.report.words import layer_words

_RATES = {"bytes": (1e9, "GB/s"), "MACs": (1e12, "TMAC/s"), "elements": (1e9, "G/s")}
_LIMITS = {"good": "at most 5 %", "usable": "at most 10 %", "suspect": "more than 10 %"}
_MOST_NAMES = 3
_PLACES = {"file": "is a file", "store": "is in the store", "bundled": "comes with moetune"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFit:
    """The measured points and the fitted line of an operation.

    Args:
        name: unique in the profile, such as "all_to_all of 8 ranks, 4 in flight".
        unit: unit of the size: "bytes", "rows", "elements", "chunks", "sequences" or "MACs".
        num_points: number of measured sizes.
        line: the α–β line over the same size, in seconds.
        error: error of the line's fit; for a GEMM's shape, of its dtype's line.
        is_shape: whether it is a shape of a GEMM or of attention, of which there are many.
    """

    name: str
    unit: str
    num_points: int = 0
    line: LinearCost | None
    error: FitError | None
    is_shape: bool = False


def operations_of(profile: Profile) -> tuple[OperationFit, ...]:
    """Return all operations of the profile, collectives first."""
    index = index_of(profile)
    first: list[CostKey] = [*index.keys(CollectiveKey), *index.pool.of(GemmKey)]
    last: list[CostKey] = [*index.keys(CopyKey), *index.keys(RowsKey)]
    last += index.keys(AttentionKey)
    return (
        *(_fit(index, key) for key in first),
        *(gemm_line(line) for line in profile.gemm if index.gemm_line(line.dtype)),
        *(_fit(index, key) for key in last),
    )


def _fit(index: ProfileIndex, key: CostKey) -> OperationFit:
    """Return an operation's fit; a GEMM shape has its dtype's line, scaled to rows."""
    series, line = index.pool.series.get(key), index.lines.get(key)
    cost = line.cost if line else None
    if isinstance(key, GemmKey):
        line = index.lines.get(GemmKey(key.dtype))
        scale = math.prod(key.shape)
        cost = replace(line.cost, beta_seconds=line.cost.beta_seconds * scale) if line else None
    is_launch = isinstance(key, RowsKey) and key.op in LAUNCHES
    return OperationFit(
        name=key.words, unit="chunks" if is_launch else unit_of(key),
        num_points=len(series.sizes) if series else 0, line=cost,
        error=line.error if line else None, is_shape=isinstance(key, GemmKey | AttentionKey),
    )  # fmt: skip


def gemm_line(line: GemmLine) -> OperationFit:
    """Return a dtype's line for all its GEMMs over multiply-accumulates."""
    name = f"GEMM in {line.dtype}"
    return OperationFit(name=name, unit="MACs", line=line.cost, error=line.error)


def profile_sections(machine: ResolvedProfile) -> tuple[Section, ...]:
    """Return the profile's head, operations, interference, sources, steps and fingerprint."""
    profile = machine.profile
    return (
        _head(machine), operations_section(profile), _interference(profile), *_tables(profile),
        *measured_steps(profile), *_fingerprint(profile),
    )  # fmt: skip


def profiles_section(infos: Sequence[ProfileInfo]) -> Section:
    """Return the table of the store's profiles and the reference machines."""
    table = Table.of(
        "profiles",
        infos,
        {
            "name": lambda info: info.name,
            "provenance": lambda info: info.provenance,
            "machine": lambda info: f"{info.num_devices} × {info.device}",
            "from": lambda info: " ".join(filter(None, (info.source, info.status))),
            "date": lambda info: Cell(text=info.created_at[:10], value=info.created_at or None),
        },
    )
    return Section(name="profiles", tables=(table,))


def machine_scope(profile: Profile) -> str:
    """Return "64 × NVIDIA H200, 8 per node, 141 GiB each"."""
    machine = profile.machine
    return (
        f"{machine.num_devices:,} × {machine.device}, {machine.devices_per_node} per node, "
        f"{format_bytes(machine.memory_bytes)} each"
    )


def quality_words(profile: Profile) -> Iterator[str]:
    """Yield how good a profile is and why, and what to measure next."""
    errors = [(curve.error, curve.name) for curve in operations_of(profile) if curve.error]
    quality, machine = quality_of(profile), profile.machine
    launch = launcher((machine.num_devices, 0), machine)
    command = f"`{launch} --name {profile.name} --preset full`"
    if quality is None or not errors:
        yield (
            f"Its quality is not known: it is {profile.provenance}, without left-out points to "
            "compare with, so that plans assume an error of 5 % in each number."
        )
        if profile.provenance != "measured":
            yield f"Measure it where such a machine is: {command}."
        return
    worst, name = max(errors, key=lambda error: error[0].median)
    yield (
        f"{quality.label.capitalize()}: the worst fit, of {name}, misses left-out points by "
        f"{format_share(worst.median)} in the median; {worst.quality} is {_LIMITS[worst.quality]}."
    )
    names = [*dict.fromkeys(name for error, name in errors if error.quality != "good")]
    if names and profile.provenance == "measured":
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        some = ", ".join(names[:_MOST_NAMES])
        yield f"Measure next, on an idle machine: {some}{more}, with {command}."


def node_words(profile: Profile) -> str:
    """Return a host's devices, memory and network cards, and the reported memory of a device."""
    site = site_of(profile)
    memory = "memory that is not known"
    if site.host_memory_bytes is not None:
        memory = f"{format_bytes(site.host_memory_bytes)} of memory"
    nics = "network cards that are not known"
    if site.num_nics is not None:
        nics = plural(site.num_nics, "network card")
    words = f"A host has {plural(site.devices_per_node, 'device')}, {memory} and {nics}"
    reported = profile.fingerprint.hardware.get(DEVICE_MEMORY, "")
    if reported.isdigit() and site.vendor != "cpu":
        words += f"; {format_bytes(int(reported))} of each device are reported"
    return f"{words}."


def _head(machine: ResolvedProfile) -> Section:
    profile = machine.profile
    source = f" ({profile.citation})" if profile.citation else ""
    origin = f"{profile.provenance.capitalize()}{source}; it {_PLACES[machine.source]}."
    samples = plural(len(profile.samples), "sample")
    suspects = sum(sample.quality == "suspect" for sample in profile.samples)
    doubt = (
        f"{suspects:,} of {samples} {'varies' if suspects == 1 else 'vary'} too much to be "
        "trusted: measure again on an idle machine."
    )
    return Section(
        name="profile",
        title=profile.name,
        scope=machine_scope(profile),
        paragraphs=(
            f"{origin} {samples}, digest {profile.digest[:8]}.",
            node_words(profile),
            *quality_words(profile),
        ),
        notes=(doubt,) if suspects else (),
    )


def _tables(profile: Profile) -> Iterator[Section]:
    if not profile.tables and profile.network is None:
        return
    blocks: dict[tuple[str, str], list[DataTable]] = {}
    for source_table in profile.tables:
        blocks.setdefault((source_table.label, source_table.source), []).append(source_table)
    rows = [
        (
            Cell.words(", ".join(dict.fromkeys(map(_table_name, block)))),
            Cell.count(sum(len(source_table.points) for source_table in block)),
            Cell.words(label),
            Cell.words(source),
        )
        for (label, source), block in blocks.items()
    ]
    if (network := profile.network) is not None:
        rate = f"{network.nic_bytes_per_second / 1e9:g} GB/s a device between nodes"
        rest = (Cell.words(network.label), Cell.words(network.source))
        rows.append((Cell.words(f"more ranks: {rate}"), EMPTY, *rest))
    header = ("operation", "points", "label", "source")
    table = Table(name="tables", header=header, rows=tuple(rows))
    yield Section(name="tables", title="Sources", tables=(table,))


def _table_name(table: DataTable) -> str:
    match table:
        case GemmTable():
            return f"{table.product} GEMM in {table.dtype}"
        case CollectiveTable():
            return f"{table.op} of {group_name((table.group_size, table.num_nodes))}"
        case DispatcherTable():
            return f"{table.dispatcher} {table.phase} of {table.group_size}"


def _interference(profile: Profile) -> Section:
    losses, speeds = tuple(_losses(profile)), speeds_of(profile.interference)
    if profile.interference.is_none:
        nothing = "No interference is known: overlapped operations run at full speed."
        return Section(name="interference", paragraphs=losses or (nothing,))

    def speed_of(victim: str, rivals: str) -> Cell:
        if victim == rivals:
            return Cell(text="–", unit="1")
        speed = speeds[victim, rivals].item()
        return Cell(text=f"{speed:.2f}", value=speed, unit="1")

    rows = (
        (Cell.words(name), *(speed_of(victim, rivals) for rivals in (*CLASSES, "all")))
        for victim, name in CLASSES.items()
    )  # fmt: skip
    header = "speed of", *(f"with {name}" for name in CLASSES.values()), "with both others"
    table = Table(name="interference", header=header, rows=tuple(rows))
    return Section(name="interference", title="Interference", paragraphs=losses, tables=(table,))


def _losses(profile: Profile) -> Iterator[str]:
    lost = index_of(profile).overlap_loss("comp")
    if lost is not None:
        sizes = ", ".join(
            f"{format_seconds(seconds)} at {format_bytes(round(size))}"
            for size, seconds in zip(lost.sizes, lost.seconds, strict=True)
        )
        yield f"An exchange slows the computation that it overlaps: {sizes}."


def _fingerprint(profile: Profile) -> Iterator[Section]:
    fingerprint = profile.fingerprint
    for name, title, values in (
        ("hardware", f"Hardware {fingerprint.hardware_id}", fingerprint.hardware),
        ("software", "Software", fingerprint.software),
    ):
        if values:
            table = facts(name, sorted(values.items()), header=("fact", "value"))
            yield Section(name=name, title=title, tables=(table,))


def operations_section(profile: Profile) -> Section:
    """Return every operation with its line and its error, shapes last."""
    operations = operations_of(profile)
    names = {operation.name for operation in operations}
    by_shape = [line for line in map(gemm_line, profile.gemm) if line.name not in names]
    ordered = sorted(operations, key=lambda operation: operation.is_shape)
    table = Table(
        name="operations",
        header=("operation", "start-up", "rate", "points", "error", "p95", "quality"),
        rows=tuple(map(_operation, (*by_shape, *ordered))),
        wide=("points",),
        empty="The profile has no operations.",
    )
    return Section(name="operations", title="Operations", tables=(without_empty_columns(table),))


def _operation(operation: OperationFit) -> tuple[Cell, ...]:
    line = operation.line
    return (
        Cell.words(operation.name),
        Cell.seconds(line.alpha_seconds if line else None),
        _rate(line.beta_seconds, operation.unit) if line else EMPTY,
        Cell.count(operation.num_points) if operation.num_points else EMPTY,
        *_errors(operation.error),
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
        Cell(text=f"{100 * share:{'.3g' if share < 1 else ',.0f'}} %", value=share, unit="1")
        for share in (error.median, error.p95)
    )
    return median, p95, Cell.words(error.quality, mark=error.quality)


def measured_steps(profile: Profile) -> Iterator[Section]:
    """Yield whole steps measured and as sums of operations; their ratios correct predictions."""
    if not profile.steps:
        return
    table = Table.of(
        "steps",
        profile.steps,
        {
            "layer": lambda step: layer_words(step.workload.layer),
            "ranks": lambda step: Cell.count(step.workload.world_size),
            "tokens": lambda step: Cell.count(step.workload.tokens_per_rank),
            "chunks": lambda step: Cell.count(step.degree),
            "sum of operations": lambda step: Cell.seconds(_summed(step)),
            "measured": lambda step: Cell.seconds(step.measured_seconds),
            "error": lambda step: Cell.share(
                prediction_error(_summed(step), step.measured_seconds), sign=True
            ),
        },
    )
    yield Section(name="steps", title="Steps of layers", tables=(table,))


def _summed(step: StepRecord) -> float:
    return step.chunks_seconds + step.overhead_seconds
