"""Checks of what a store accepts: times that steps and operations can take.

Every page can show these. Values are checked where they enter a store, and not where they are read.
Rows of older versions stay readable, and `moetune db check` names them.
"""

from collections.abc import Iterable, Iterator

from moetune.domain.any_plan import AnyPlan
from moetune.domain.costs import LinearCost
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.records import LONGEST_SECONDS, SHORTEST_SECONDS, Settled
from moetune.domain.samples import Sample

_SHORTEST = {"step": SHORTEST_SECONDS, "operation": 1e-12}
"""Least seconds. A small table's entry takes longer even at the highest rate of a data sheet."""
FASTEST_SECONDS = 1e-15
"""Least time of a million bytes, elements or multiply-accumulates: a rate of 1e21 a second."""
LARGEST_SIZE = 1e21
_SIZE = 1e6
_Times = Iterator[tuple[str, str, Iterable[float]]]


def check(value: AnyPlan | Profile | Sample | Settled) -> None:
    """Raise InputError for a time that no step or operation takes, or an impossible rate.

    Lines are checked at a million bytes or multiply-accumulates; tables are checked row by row.
    """
    for what, name, times in _times(value):
        for seconds in times:
            if not _SHORTEST[what] <= seconds <= LONGEST_SECONDS:
                raise InputError(
                    f"{name} has {seconds:g} s, which no {what} takes",
                    f"times from {_SHORTEST[what]:g} to {LONGEST_SECONDS:g} s can be stored",
                )
    if isinstance(value, Profile):
        _check_rates(value)


def _times(value: AnyPlan | Profile | Sample | Settled) -> _Times:
    """Yield "step" or "operation", the times' name, and the times."""
    match value:
        case Settled():
            yield "step", "planned_seconds", (value.planned_seconds,)
            yield "step", "seconds", value.seconds
        case Sample():
            yield "operation", f"{value.point.kind} sample", value.seconds
        case Profile():
            for sample in value.samples:
                yield from _times(sample)
            for table in value.tables:
                yield "operation", f"{table.kind} table", (row[-1] for row in table.points)
            for record in value.steps:
                yield "step", "chunks_seconds", (record.chunks_seconds,)
                yield "step", "measured_seconds", (record.measured_seconds,)
        case _:
            for name, seconds in value.step_times:
                yield "step", name, (seconds,)


def _check_rates(profile: Profile) -> None:
    for name, line in _lines(profile):
        seconds = line.seconds(_SIZE)
        if not FASTEST_SECONDS <= seconds <= LONGEST_SECONDS:
            raise InputError(
                f"{name} takes {seconds:g} s for a million, which no operation does",
                f"times from {FASTEST_SECONDS:g} to {LONGEST_SECONDS:g} s can be stored",
            )
    for table in profile.tables:
        largest = max(size for row in table.points for size in row[:-1])
        if largest > LARGEST_SIZE:
            raise InputError(f"{table.kind} table has the size {largest:g}, which is too large")


def _lines(profile: Profile) -> Iterator[tuple[str, LinearCost]]:
    yield from ((f"gemm line of {line.dtype}", line.cost) for line in profile.gemm)
    yield from (
        (f"line of {line.op} of {line.group_size}", line.cost) for line in profile.collective
    )
    yield from ((f"copy line {line.direction}", line.cost) for line in profile.copy)
    yield from ((f"line of {line.op}", line.cost) for line in profile.rows)
    if (network := profile.network) is not None:
        startup = network.startup(network.most_nodes) + network.posted_chunk_seconds
        rate = network.bytes_per_second(network.most_nodes)
        yield "network", LinearCost(alpha_seconds=startup, beta_seconds=1 / rate)
