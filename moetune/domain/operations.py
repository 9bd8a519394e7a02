"""The operations of a layer's chunks: those that a plan predicts, and their observed times."""

import math
from dataclasses import dataclass
from typing import Literal

from moetune.domain.errors import InputError, check_positive
from moetune.domain.layer import PHASES, Phase, Workload
from moetune.domain.plan import Decision, Plan
from moetune.domain.units import dtype_bytes, format_bytes

OperationName = Literal["all_to_all", "all_reduce", "reduce_scatter", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One chunk's transfer or computation, by what its cost depends on.

    Args:
        size: of a transfer the input bytes of one rank; of the experts the MACs of one of their
            GEMMs, all local experts together.
        degree: chunks of the phase, whose transfers are in flight together.
    """

    name: OperationName
    phase: Phase
    size: int
    degree: int

    def __post_init__(self) -> None:
        check_positive(self, "size", "degree")

    @property
    def words(self) -> str:
        """The operation in a sentence, as "all_to_all of 2.0 MiB (forward, 4 chunks)"."""
        chunks = f"{self.phase}, {self.degree} chunk{'s' if self.degree > 1 else ''}"
        what = self.name if self.name == "experts" else f"{self.name} of {format_bytes(self.size)}"
        return f"{what} ({chunks})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes:
    """Observed times of one operation while the phase's other operations ran beside it.

    Args:
        predicted_seconds: of the plan, with nothing beside it; None where it predicted none.
        seconds: one for each observed step: of experts the mean of the step's chunks, of
            transfers `transfer_seconds`.

    Raises:
        InputError: no times, or one that is not positive and finite.
    """

    operation: Operation
    predicted_seconds: float | None
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        predicted = () if self.predicted_seconds is None else (self.predicted_seconds,)
        if not self.seconds or not all(0 < time < math.inf for time in self.seconds + predicted):
            raise InputError(
                f"{self.operation.name}: seconds must be positive and finite, and at least one"
            )


def operations_of(workload: Workload, decision: Decision) -> tuple[Operation, ...]:
    """Return the transfer and the experts of both phases' chunks; of one rank the experts alone.

    Sizes are those of balanced chunks, which costs are predicted for.

    Raises:
        InputError: phases have different numbers of chunks, as in plans of before.
    """
    is_dispatched = workload.expert_parallel == "all_to_all"
    payload_rows = workload.rows if is_dispatched else workload.tokens_per_rank
    payload_bytes = payload_rows * workload.layer.d_model * dtype_bytes(workload.dtype)
    # Experts of a tensor-parallel group share the pairs of the tokens that all ranks have.
    macs = workload.macs if is_dispatched else workload.macs / workload.world_size
    name: OperationName = "reduce_scatter" if workload.gathers else "all_reduce"
    name = "all_to_all" if is_dispatched else name
    operations, degree = [], decision.degree
    for phase in PHASES:
        if workload.world_size > 1:
            size = max(1, round(payload_bytes / degree))
            operations.append(Operation(name=name, phase=phase, size=size, degree=degree))
        size = max(1, round(macs / degree))
        operations.append(Operation(name="experts", phase=phase, size=size, degree=degree))
    return tuple(operations)


def transfer_seconds(
    workload: Workload, *, degree: int, phase_seconds: float, compute_seconds: float
) -> float:
    """Return one chunk's transfer, from the time of its phase: the makespan solved for it.

    With transfers to and from the experts T = max(2·r·t, 2·t + r·t_e), so that
    t = min(T/(2·r), (T − r·t_e)/2); with one sum a chunk T = max(t_e + r·t, r·t_e + t). It needs no
    end of a hidden transfer, which only another thread could see.

    Args:
        degree: r.
        phase_seconds: T, from the first transfer or computation to the end of the last transfer.
        compute_seconds: t_e, one chunk's experts.

    Returns:
        At most 0 where the phase took no longer than its computations.
    """
    exposed = phase_seconds - degree * compute_seconds
    if workload.expert_parallel == "all_to_all":
        return min(phase_seconds / (2 * degree), exposed / 2)
    return min((phase_seconds - compute_seconds) / degree, exposed)


def predicted_seconds(plan: Plan, operation: Operation) -> float | None:
    """Return the time that the plan's terms give the operation; None at another degree than its."""
    terms = None if plan.terms is None else getattr(plan.terms, operation.phase)
    if terms is None or terms.degree != operation.degree:
        return None
    is_experts = operation.name == "experts"
    seconds = terms.compute_seconds if is_experts else terms.transfer_seconds
    return float(seconds) if seconds > 0 else None
