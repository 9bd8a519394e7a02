"""Costs of a machine of which one part takes longer or shorter, to see what a plan follows.

`fit.scaled` changes a whole profile, with its samples; this changes the costs that were fitted to
it, finer: a collective's start-up time apart from its bandwidth.
"""

from dataclasses import dataclass
from typing import get_args

from moetune.domain.costs import Burst, CopyMode, Costs, Estimate, LinearCost
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed, OverlapSpeeds
from moetune.domain.layer import LayerKey
from moetune.domain.samples import CollectiveOp, Direction
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
_SMALLEST_BYTES = 1.0
"""Stands for the smallest message, whose time is all start-up."""


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

    Start-up is what the α–β line has at no bytes; where points were measured instead, the time of
    the smallest message. Measured GEMMs have no start-up of their own: all of their time is rate.
    """

    def __init__(self, costs: Costs, slowdown: Slowdown) -> None:
        self._costs = costs
        self._part, self._factor = slowdown.part, slowdown.factor

    @property
    def takes_arrays(self) -> bool:
        """Never: start-up times are those of one size."""
        return False

    @property
    def copy_mode(self) -> CopyMode | None:
        """That of the costs."""
        return self._costs.copy_mode

    def burst(self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0) -> Burst:
        """Return the lead of the link after a pause, as fast as before."""
        return self._costs.burst(op=op, group_size=group_size, num_nodes=num_nodes)

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

    def gemm_line(self, *, dtype: str) -> LinearCost | None:
        """Return the line of slower GEMMs."""
        line = self._costs.gemm_line(dtype=dtype)
        return None if line is None else self._line(line, GEMM_START, GEMM_RATE)

    def collective_line(
        self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0
    ) -> LinearCost | None:
        """Return the line of slower collectives."""
        line = self._costs.collective_line(op=op, group_size=group_size, num_nodes=num_nodes)
        return None if line is None else self._line(line, f"{op} {START}", f"{op} {BANDWIDTH}")

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        """Return the slower time."""
        found = self._costs.gemm(
            dtype=dtype, product=product, num_experts=num_experts, rows=rows, d_in=d_in,
            d_out=d_out,
        )  # fmt: skip
        if self._part not in {GEMM_RATE, GEMM_START}:
            return found
        line = self._costs.gemm_line(dtype=dtype)
        start = 0.0 if line is None else line.alpha_seconds
        return self._split(found, start, is_start=self._part == GEMM_START)

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        """Return the slower time."""
        found = self._costs.rows_op(op=op, dtype=dtype, rows=rows, width=width)
        return None if found is None else self._whole(found, ROWS)

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        """Return the slower time."""
        found = self._costs.collective(
            op=op, group_size=group_size, num_bytes=num_bytes, in_flight=in_flight,
            num_nodes=num_nodes,
        )  # fmt: skip
        if self._part not in {f"{op} {START}", f"{op} {BANDWIDTH}"}:
            return found
        line = self._costs.collective_line(op=op, group_size=group_size, num_nodes=num_nodes)
        if line is not None:
            start = line.alpha_seconds
        else:
            start = (
                self._costs.collective(
                    op=op, group_size=group_size, num_bytes=min(num_bytes, _SMALLEST_BYTES),
                    in_flight=in_flight, num_nodes=num_nodes,
                )
                .seconds
            )  # fmt: skip
        return self._split(found, start, is_start=self._part == f"{op} {START}")

    def attention(
        self,
        *,
        dtype: str,
        num_sequences: float,
        length: int,
        num_heads: int,
        head_dim: int,
        backward: bool,
    ) -> Estimate | None:
        """Return the slower time."""
        found = self._costs.attention(
            dtype=dtype, num_sequences=num_sequences, length=length, num_heads=num_heads,
            head_dim=head_dim, backward=backward,
        )  # fmt: skip
        return None if found is None else self._whole(found, ATTENTION)

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        """Return the slower time."""
        found = self._costs.copy(direction=direction, pinned=pinned, num_bytes=num_bytes)
        return self._whole(found, COPIES)

    def _whole(self, found: Estimate, part: str) -> Estimate:
        return found.scaled(self._factor) if self._part == part else found

    def _split(self, found: Estimate, start: float, *, is_start: bool) -> Estimate:
        """Return the time with its start-up, or the rest of it, multiplied."""
        start = min(start, found.seconds)
        changed = start if is_start else found.seconds - start
        return found._replace(seconds=found.seconds + (self._factor - 1) * changed)

    def _line(self, line: LinearCost, start: str, rate: str) -> LinearCost:
        return LinearCost(
            alpha_seconds=line.alpha_seconds * (self._factor if self._part == start else 1.0),
            beta_seconds=line.beta_seconds * (self._factor if self._part == rate else 1.0),
        )

    def _speed(self, speed: float) -> float:
        """Return a speed beside others, of which what takes longer is multiplied."""
        return 1 / (1 + self._factor * (1 / speed - 1))
