"""Costs of a machine of which one part takes longer or shorter, to see what a plan follows.

`fit.scaled` changes a whole profile, with its samples; this changes the costs that were fitted to
it, finer: a collective's start-up time apart from its bandwidth.
"""

from dataclasses import dataclass
from typing import get_args

from moetune.domain.arrays import shorter
from moetune.domain.cost_keys import (
    AttentionKey,
    CollectiveKey,
    CopyKey,
    CostKey,
    GemmKey,
    RowsKey,
)
from moetune.domain.costs import CopyMode, Costs, Estimate
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed, OverlapSpeeds
from moetune.domain.layer import LayerKey
from moetune.domain.samples import CollectiveOp
from moetune.domain.step_errors import StepErrors

GEMM_RATE, GEMM_START = "gemm rate", "gemm start-up"
ATTENTION, ROWS, COPIES = "attention", "memory-bound operations", "copies"
INTERFERENCE = "interference"
BANDWIDTH, START = "bandwidth", "start-up"
COLLECTIVE_PARTS = tuple(
    f"{op} {which}" for op in get_args(CollectiveOp) for which in (BANDWIDTH, START)
)
PARTS = (GEMM_RATE, GEMM_START, *COLLECTIVE_PARTS, ATTENTION, ROWS, COPIES, INTERFERENCE)
"""Of a machine, by the names that documents have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A part of the machine, and the factor on its times: above 1 it is slower."""

    part: str
    factor: float


def slowed(costs: Costs, slowdown: Slowdown | None) -> Costs:
    """Return the costs with one part's times multiplied; the costs themselves for None."""
    return costs if slowdown is None else SlowedCosts(costs, slowdown)


class SlowedCosts:
    """Costs (`domain.costs.Costs`) of which one part takes so many times as long.

    Start-up is the time of no bytes, or no rows. Measured GEMMs have no start-up of their own: all
    of their time is rate.
    """

    def __init__(self, costs: Costs, slowdown: Slowdown) -> None:
        self._costs = costs
        self._part, self._factor = slowdown.part, slowdown.factor

    @property
    def copy_mode(self) -> CopyMode | None:
        """That of the costs."""
        return self._costs.copy_mode

    def knows(self, key: CostKey) -> bool:
        """Return whether the costs know it."""
        return self._costs.knows(key)

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        """Return those of the costs."""
        return self._costs.step_errors(key, tokens=tokens)

    @property
    def interference(self) -> Interference:
        """The table; what an operation takes longer beside others is multiplied."""
        table = self._costs.interference
        if self._part != INTERFERENCE:
            return table
        comp, comm, mem = table.comp, table.comm, table.mem
        speed = self._speed
        return Interference(
            comp=CompSpeed(comm=speed(comp.comm), mem=speed(comp.mem), all=speed(comp.all)),
            comm=CommSpeed(comp=speed(comm.comp), mem=speed(comm.mem), all=speed(comm.all)),
            mem=MemSpeed(comp=speed(mem.comp), comm=speed(mem.comm), all=speed(mem.all)),
        )

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return the speeds of an exchange that takes as long."""
        found = self._costs.overlap_speeds(
            exchange_bytes=exchange_bytes, exchange_seconds=exchange_seconds
        )
        if self._part != INTERFERENCE:
            return found
        return OverlapSpeeds(comp=self._speed(found.comp), comm=self._speed(found.comm))

    def is_measured(self, dtype: str) -> bool:
        """Return whether points predict the dtype's GEMMs."""
        return self._costs.is_measured(dtype)

    def seconds(self, key: CostKey, size: float) -> Estimate:
        """Return the slower time: all of it, or of GEMMs and collectives start-up or rate alone."""
        found, (start, rate) = self._costs.seconds(key, size), _parts(key)
        if self._part not in {start, rate}:
            return found
        if start == rate:
            return found.scaled(self._factor)
        none = isinstance(key, GemmKey) and self._costs.is_measured(key.dtype)
        first = 0.0 if none else shorter(self._costs.seconds(key, 0.0).seconds, found.seconds)
        changed = first if self._part == start else found.seconds - first
        return found._replace(seconds=found.seconds + (self._factor - 1) * changed)

    def _speed(self, speed: float) -> float:
        """Return a speed beside others, of which what takes longer is multiplied."""
        return 1 / (1 + self._factor * (1 / speed - 1))


def _parts(key: CostKey) -> tuple[str, str]:
    """Return the parts of the machine that an operation's start-up and rate are."""
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
