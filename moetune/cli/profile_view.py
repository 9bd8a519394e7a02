"""A profile in words."""

from collections.abc import Iterator

from moetune.cli.render import Screen, plural
from moetune.domain.cluster import Machine, placement_name
from moetune.domain.profile import CollectiveLine, CopyLine, FitError, GemmLine, Profile
from moetune.domain.units import format_bytes, format_seconds
from moetune.workflows.profiles import FoundProfile

_PLACES = {"file": "is a file", "store": "is in the store", "bundled": "comes with moetune"}

"""Share of its start-up by which a piece must grow to have a rate worth showing."""
_GIGA = 1e9
_TERA = 1e12


def show_profile(screen: Screen, found: FoundProfile) -> None:
    """Print the machine, the lines with their errors, and what disturbs what."""
    profile = found.profile
    machine = profile.machine
    screen.say(
        f"{profile.name} · {machine.num_devices} × {machine.device}, "
        f"{machine.devices_per_node} a node · {format_bytes(machine.memory_bytes)} each",
        style="bold",
    )
    source = f" ({profile.citation})" if profile.citation else ""
    screen.say(
        f"{profile.provenance.capitalize()}{source}; it {_PLACES[found.source]}. "
        f"{plural(len(profile.samples), 'sample')}, digest {profile.digest[:8]}.",
        indent=2,
    )
    rows = list(_rows(profile))
    if rows:
        header = ("operation", "start-up", "rate", "quality", "error (p95)")
        screen.table(header, rows, right=(1, 2))
    if profile.interference.is_none:
        screen.say("Nothing is known to disturb anything: interference 1.0 everywhere.", indent=2)
    else:
        screen.table(("speed of", "beside", "", ""), list(_speeds(profile)))
    suspect = [sample for sample in profile.samples if sample.quality == "suspect"]
    if suspect:
        screen.say(
            f"{plural(len(suspect), 'sample')} of {len(profile.samples)} "
            "vary too much to be trusted: measure again on a quiet machine.",
            indent=2,
        )


def _rows(profile: Profile) -> Iterator[tuple[str, ...]]:
    for gemm in profile.gemm:
        yield _gemm_row(gemm)
    for line in profile.collective:
        yield _line_row(_collective_name(line, profile.machine), line)
    for copy in profile.copy:
        both = ", both ways" if copy.both_ways else ""
        pinned = "pinned" if copy.pinned else "pageable"
        yield _line_row(f"{copy.direction} {pinned}{both}", copy)
    for rows in profile.rows:
        rate = f"{1 / rows.beta_seconds_per_element / _GIGA:.3g} G/s"
        name = f"{rows.op} {rows.dtype}"
        yield (name, format_seconds(rows.alpha_seconds), rate, *_quality(None))


def _gemm_row(line: GemmLine) -> tuple[str, ...]:
    beta = line.beta_seconds_per_mac
    rate = f"{1 / beta / _TERA:.3g} TMAC/s" if beta else "—"
    return (f"gemm {line.dtype}", format_seconds(line.alpha_seconds), rate, *_quality(line.error))


def _line_row(name: str, line: CollectiveLine | CopyLine) -> tuple[str, ...]:
    beta = line.beta_seconds_per_byte
    rate = f"{1 / beta / _GIGA:.3g} GB/s" if beta else "—"
    return (name, format_seconds(line.alpha_seconds), rate, *_quality(line.error))


def _collective_name(line: CollectiveLine, machine: Machine) -> str:
    flight = f", {line.in_flight} in flight" if line.in_flight > 1 else ""
    return f"{line.op}, {placement_name((line.group_size, line.num_nodes), machine)}{flight}"


def _quality(error: FitError | None) -> tuple[str, str]:
    if error is None:
        return "", "not known"
    return error.quality, f"{_percent(error.median)} ({_percent(error.p95)})"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 1 else f"{100 * share:,.0f} %"


def _speeds(profile: Profile) -> Iterator[tuple[str, ...]]:
    speeds = profile.interference
    comp, comm, mem = speeds.comp, speeds.comm, speeds.mem
    yield "comp", f"comm {comp.comm:.2f}", f"mem {comp.mem:.2f}", f"both {comp.all:.2f}"
    yield "comm", f"comp {comm.comp:.2f}", f"mem {comm.mem:.2f}", f"both {comm.all:.2f}"
    yield "mem", f"comp {mem.comp:.2f}", f"comm {mem.comm:.2f}", f"both {mem.all:.2f}"
