"""Checks of what a store accepts: times that steps and operations can take.

Every page can show these. Values are checked where they enter a store, and not where they are
read: rows of older versions stay readable, and `moetune db check` names them.
"""

from collections.abc import Iterable, Iterator

from moetune.domain.any_plan import AnyPlan
from moetune.domain.costs import LinearCost
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.records import LONGEST_SECONDS, SHORTEST_SECONDS, Observation, Settled
from moetune.domain.samples import Sample

_SHORTEST = {"step": SHORTEST_SECONDS, "operation": 1e-12}
"""A small table's entry at the highest rate of a data sheet is above that of an operation."""
FASTEST_SECONDS = 1e-15
"""Of a million bytes, elements or multiply-accumulates: a rate of 1e21 a second."""
LARGEST_SIZE = 1e21
_SIZE = 1e6


def check_observation(observation: Observation) -> None:
    """Raise InputError for a time that no step takes."""
    operations = ((times.operation.name, times.seconds) for times in observation.operations)
    predicted = ("predicted_seconds", (observation.predicted_seconds,))
    for name, times in (predicted, ("seconds", observation.seconds), *operations):
        _check("step", name, times)


def check_settled(settled: Settled) -> None:
    """Raise InputError for a time that no step takes."""
    _check("step", "planned_seconds", (settled.planned_seconds,))
    _check("step", "seconds", settled.seconds)


def check_plan(plan: AnyPlan) -> None:
    """Raise InputError for a prediction that no step takes."""
    for name, seconds in plan.step_times:
        _check("step", name, (seconds,))


def check_samples(samples: Iterable[Sample]) -> None:
    """Raise InputError for a time that no operation takes."""
    for sample in samples:
        _check("operation", f"{sample.point.kind} sample", sample.seconds)


def check_profile(profile: Profile) -> None:
    """Raise InputError for rates and times that no operation has.

    Lines are looked at where a million bytes or multiply-accumulates are; tables row by row.
    """
    check_samples(profile.samples)
    for name, line in _lines(profile):
        seconds = line.seconds(_SIZE)
        if not FASTEST_SECONDS <= seconds <= LONGEST_SECONDS:
            raise InputError(
                f"{name} takes {seconds:g} s for a million, which no operation does",
                f"times from {FASTEST_SECONDS:g} to {LONGEST_SECONDS:g} s can be stored",
            )
    for table in profile.tables:
        _check("operation", f"{table.kind} table", (row[-1] for row in table.points))
        largest = max(size for row in table.points for size in row[:-1])
        if largest > LARGEST_SIZE:
            raise InputError(f"{table.kind} table has the size {largest:g}, which is too large")
    for record in profile.steps:
        _check("step", "chunks_seconds", (record.chunks_seconds,))
        _check("step", "measured_seconds", (record.measured_seconds,))


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


def _check(what: str, name: str, times: Iterable[float]) -> None:
    shortest = _SHORTEST[what]
    for seconds in times:
        if not shortest <= seconds <= LONGEST_SECONDS:
            raise InputError(
                f"{name} has {seconds:g} s, which no {what} takes",
                f"times from {shortest:g} to {LONGEST_SECONDS:g} s can be stored",
            )
