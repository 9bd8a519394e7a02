"""Profiles of machines with faster or slower parts: every time divided by a part's speed."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TypeVar

from moetune.domain.cluster import FASTER, Machine
from moetune.domain.errors import InputError
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
    CollectivePoint,
    CopyPoint,
    InterferencePoint,
    Point,
    ResourceClass,
    Sample,
    StepPoint,
)
from moetune.fit.interference import interference_of
from moetune.fit.pool import pool

SLOWEST, FASTEST = 1e-3, 1e3
_Line = TypeVar("_Line", GemmLine, CollectiveLine, CopyLine, RowsLine)
_CLASSES: Mapping[ResourceClass, str] = MappingProxyType(
    {"comp": "computation", "comm": "communication", "mem": "copies"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Factors by which the parts of a machine are taken to be faster than measured.

    Args:
        computation: GEMMs, attention and whatever else the ranks compute.
        communication: collectives and sends.
        copies: between host and device.

    Raises:
        InputError: a factor out of range.
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

    Start-up times and times per byte or MAC are divided alike, so that every curve keeps
    its shape and every fit its relative error. How much operations disturb each other stays as
    it was measured. The profile is "modelled" and has a name of its own.
    """
    changed = speeds.changed
    if not changed:
        return profile
    own = interference_of(pool(profile.samples).interference) == profile.interference
    samples = tuple(_sample(one, speeds) for one in profile.samples)
    factors = ", ".join(f"{part} × {factor:g}" for part, factor in changed.items())
    return replace(
        profile,
        name=f"{profile.name} with {factors}",
        provenance="modelled",
        machine=_machine(profile.machine, speeds.computation),
        gemm=_lines(profile.gemm, speeds.computation),
        collective=_lines(profile.collective, speeds.communication),
        copy=_lines(profile.copy, speeds.copies),
        rows=_lines(profile.rows, speeds.computation),
        # The same but for rounding; costs use the samples' own only where these equal the table.
        interference=interference_of(pool(samples).interference) if own else profile.interference,
        samples=samples,
        tables=tuple(_table(table, speeds) for table in profile.tables),
        network=_network(profile.network, speeds.communication),
    )


def _lines(lines: tuple[_Line, ...], factor: float) -> tuple[_Line, ...]:
    def faster(seconds: float) -> float:
        return seconds / factor

    return tuple(changed_line(line, start=faster, rate=faster) for line in lines)


def _machine(machine: Machine, factor: float) -> Machine:
    """Return the machine with another device, whose data sheet nobody has."""
    if factor == 1.0:
        return machine
    return replace(machine, device=f"{machine.device}{FASTER}{factor:g}")


def _table(table: Table, speeds: Speeds) -> Table:
    factor = speeds.computation if table.kind == "gemm" else speeds.communication
    points = tuple((*sizes, seconds / factor) for *sizes, seconds in table.points)
    return replace(table, points=points)


def _network(network: Network | None, factor: float) -> Network | None:
    if network is None:
        return None
    return replace(
        network,
        nic_bytes_per_second=network.nic_bytes_per_second * factor,
        startup_seconds=network.startup_seconds / factor,
        startup_seconds_per_node=network.startup_seconds_per_node / factor,
        posted_chunk_seconds=network.posted_chunk_seconds / factor,
    )


def _sample(sample: Sample, speeds: Speeds) -> Sample:
    if isinstance(sample.point, StepPoint):
        return sample  # the profile has its ratio to what its operations say, which stays
    factor = getattr(speeds, _CLASSES[_class_of(sample.point)])
    return replace(sample, seconds=tuple(one / factor for one in sample.seconds))


def _class_of(point: Point) -> ResourceClass:
    if isinstance(point, InterferencePoint):
        return point.victim
    if isinstance(point, CollectivePoint):
        return "comm"
    return "mem" if isinstance(point, CopyPoint) else "comp"
