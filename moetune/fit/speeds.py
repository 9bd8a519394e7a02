"""Machines with faster or slower parts: a scaled profile, or scaled costs of a profile."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TypeVar, get_args

from moetune.domain.arrays import Floats, Sizes
from moetune.domain.cluster import FASTER
from moetune.domain.cost_keys import AttentionKey, CollectiveKey, CopyKey, CostKey, GemmKey, RowsKey
from moetune.domain.costs import CopyMode, Costs, Estimate, Number, scaled
from moetune.domain.errors import InputError
from moetune.domain.interference import OverlapSpeeds, SpeedTable
from moetune.domain.layer import LayerKey
from moetune.domain.profile import (
    CollectiveLine,
    CopyLine,
    GemmLine,
    Profile,
    RowsLine,
    changed_line,
)
from moetune.domain.reference import Network, Table
from moetune.domain.samples import (
    CollectiveOp,
    CollectivePoint,
    CopyPoint,
    InterferencePoint,
    Point,
    ResourceClass,
    Sample,
    StepPoint,
)
from moetune.domain.step_errors import StepErrors
from moetune.fit.interference import interference_of
from moetune.fit.pool import pool

SLOWEST, FASTEST = 1e-3, 1e3
_Line = TypeVar("_Line", GemmLine, CollectiveLine, CopyLine, RowsLine)
_CLASSES: Mapping[ResourceClass, str] = MappingProxyType(
    {"comp": "computation", "comm": "communication", "mem": "copies"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Factors by which parts of a machine are faster than measured; InputError out of range.

    Args:
        computation: GEMMs, attention and all other computation of the ranks.
        communication: collectives and sends.
        copies: between host and device.
    """

    computation: float = 1.0
    communication: float = 1.0
    copies: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            factor = getattr(self, item.name)
            if not SLOWEST <= factor <= FASTEST:
                raise InputError(
                    f"speed of {item.name} must be from {SLOWEST:g} to {FASTEST:g}, got {factor:g}"
                )

    @property
    def changed(self) -> Mapping[str, float]:
        """The factors that are not 1."""
        factors = {item.name: float(getattr(self, item.name)) for item in fields(self)}
        return {name: factor for name, factor in factors.items() if factor != 1.0}


def scale_profile(profile: Profile, speeds: Speeds) -> Profile:
    """Return the profile with every measured time divided by the speed of its part.

    Start-up times and times per byte or MAC are divided alike, so that every curve keeps its shape
    and every fit its relative error. Interference between operations stays as measured. The profile
    is "modelled" and gets a new name.
    """
    changed = speeds.changed
    if not changed:
        return profile
    is_of_samples = interference_of(pool(profile.samples).interference) == profile.interference
    samples = tuple(_sample(sample, speeds) for sample in profile.samples)
    factors = ", ".join(f"{part} × {factor:g}" for part, factor in changed.items())
    machine, faster = profile.machine, speeds.computation
    if faster != 1.0:  # a device without a data sheet
        machine = replace(machine, device=f"{machine.device}{FASTER}{faster:g}")
    return replace(
        profile,
        name=f"{profile.name} with {factors}",
        provenance="modelled",
        machine=machine,
        gemm=_lines(profile.gemm, speeds.computation),
        collective=_lines(profile.collective, speeds.communication),
        copy=_lines(profile.copy, speeds.copies),
        rows=_lines(profile.rows, speeds.computation),
        # Equal except for rounding; costs use the samples' factors only if they equal the table.
        interference=interference_of(pool(samples).interference)
        if is_of_samples
        else profile.interference,
        samples=samples,
        tables=tuple(_table(table, speeds) for table in profile.tables),
        network=_network(profile.network, speeds.communication),
    )


def _lines(lines: tuple[_Line, ...], factor: float) -> tuple[_Line, ...]:
    def faster(seconds: float) -> float:
        return seconds / factor

    return tuple(changed_line(line, start=faster, rate=faster) for line in lines)


def _table(table: Table, speeds: Speeds) -> Table:
    factor = speeds.computation if table.kind == "gemm" else speeds.communication
    points = tuple((*sizes, seconds / factor) for *sizes, seconds in table.points)
    return replace(table, points=points)


def _network(network: Network | None, factor: float) -> Network | None:
    if network is None:
        return None
    names = ("startup_seconds", "startup_seconds_per_node", "posted_chunk_seconds")
    seconds = {name: getattr(network, name) / factor for name in names}
    return replace(network, nic_bytes_per_second=network.nic_bytes_per_second * factor, **seconds)


def _sample(sample: Sample, speeds: Speeds) -> Sample:
    if isinstance(sample.point, StepPoint):
        return sample  # its ratio to the sum of its operations stays
    factor = getattr(speeds, _CLASSES[_class_of(sample.point)])
    return replace(sample, seconds=tuple(seconds / factor for seconds in sample.seconds))


def _class_of(point: Point) -> ResourceClass:
    if isinstance(point, InterferencePoint):
        return point.victim
    if isinstance(point, CollectivePoint):
        return "comm"
    return "mem" if isinstance(point, CopyPoint) else "comp"


GEMM_RATE, GEMM_START = "gemm rate", "gemm start-up"
ATTENTION, ROWS, COPIES = "attention", "memory-bound operations", "copies"
INTERFERENCE = "interference"
BANDWIDTH, START = "bandwidth", "start-up"
COLLECTIVE_PARTS = tuple(
    f"{op} {which}" for op in get_args(CollectiveOp) for which in (BANDWIDTH, START)
)
PARTS = (GEMM_RATE, GEMM_START, *COLLECTIVE_PARTS, ATTENTION, ROWS, COPIES, INTERFERENCE)
"""Parts of a machine, by their names in documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A part of the machine, and the factor on its times; above 1 the part is slower."""

    part: str
    factor: float


def slowed(costs: Costs, slowdown: Slowdown | None) -> Costs:
    """Return the costs with the times of one part multiplied; None leaves the costs unchanged."""
    return costs if slowdown is None else SlowedCosts(costs, slowdown)


class SlowedCosts:
    """Costs (`domain.costs.Costs`) with the times of one part multiplied.

    Start-up is the time of zero bytes or zero rows. Measured GEMMs have no separate start-up: all
    of their time is rate.
    """

    def __init__(self, costs: Costs, slowdown: Slowdown) -> None:
        self._costs = costs
        self._part, self._factor = slowdown.part, slowdown.factor

    @property
    def copy_mode(self) -> CopyMode | None:
        """The copy mode of the underlying costs."""
        return self._costs.copy_mode

    def knows(self, key: CostKey) -> bool:
        """Return whether the underlying costs know the operation."""
        return self._costs.knows(key)

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        """Return the step errors of the underlying costs."""
        return self._costs.step_errors(key, tokens=tokens)

    @property
    def speeds(self) -> SpeedTable:
        """The table; the extra time of each operation in overlap is multiplied."""
        table = self._costs.speeds
        if self._part != INTERFERENCE:
            return table
        return {pair: self._speed(speed) for pair, speed in table.items()}

    def overlap_speeds(self, *, exchange_bytes: Sizes, exchange_seconds: Sizes) -> OverlapSpeeds:
        """Return the speeds in overlap, with the extra time multiplied for interference."""
        speeds = self._costs.overlap_speeds(
            exchange_bytes=exchange_bytes, exchange_seconds=exchange_seconds
        )
        if self._part != INTERFERENCE:
            return speeds
        return OverlapSpeeds(*map(self._speed, speeds))

    def is_measured(self, dtype: str) -> bool:
        """Return whether measured points, not a line, predict the dtype's GEMMs."""
        return self._costs.is_measured(dtype)

    def seconds(self, key: CostKey, size: Number) -> Estimate[Number]:
        """Return the slower time: all of it, or a GEMM's or collective's start-up or rate alone."""
        estimate, (start, rate) = self._costs.seconds(key, size), _parts(key)
        if self._part not in {start, rate}:
            return estimate
        if start == rate:
            return scaled(estimate, self._factor)
        none = isinstance(key, GemmKey) and self._costs.is_measured(key.dtype)
        first = 0.0 if none else self._costs.seconds(key, 0.0 * size).seconds
        changed = first if self._part == start else estimate.seconds - first
        return estimate._replace(seconds=estimate.seconds + (self._factor - 1) * changed)

    def _speed(self, speed: Floats) -> Floats:
        """Return a speed in overlap whose extra time is multiplied."""
        return 1 / (1 + self._factor * (1 / speed - 1))


def _parts(key: CostKey) -> tuple[str, str]:
    """Return the machine parts that set an operation's start-up and its rate."""
    match key:
        case GemmKey():
            return GEMM_START, GEMM_RATE
        case CollectiveKey():
            return f"{key.op} {START}", f"{key.op} {BANDWIDTH}"
        case RowsKey():
            return ROWS, ROWS
        case AttentionKey():
            return ATTENTION, ATTENTION
        case CopyKey():
            return COPIES, COPIES
