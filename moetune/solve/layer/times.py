"""Predicted times of phases and steps: closed forms, and timelines where memory is reused."""

from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from moetune.domain.arrays import Floats, array_of, as_number, floats_of
from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Doubt, Estimate, Trust, least_trust
from moetune.domain.layer import PHASES, Phase
from moetune.domain.plan import Binding
from moetune.solve.layer.costs import LayerCosts, key_of
from moetune.solve.layer.degree import makespan, tensor_parallel_makespan
from moetune.solve.layer.operations import NOTHING, doubts_of
from moetune.solve.layer.reuse import chunk_of, reused_seconds
from moetune.solve.layer.timeline import Ints, Task, pipeline_tasks, tensor_parallel_tasks

OVERHEAD_SHARE = 0.05
"""Share of the step below which the overhead's trust does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase at one degree.

    Args:
        seconds: from the first dispatch to the last combine; in tensor parallelism from the first
            chunk's experts to the last all-reduce.
        transfer: one chunk's dispatch or combine; in tensor parallelism its all-reduce.
        num_transfers: of a chunk; 3 where it is dispatched again, 1 in tensor parallelism.
    """

    degree: int
    seconds: float
    transfer: Estimate
    compute: Estimate
    copies: Estimate = NOTHING
    num_transfers: int

    @property
    def link_seconds(self) -> float:
        """All transfers, undisturbed: 2·r·t_d, or r·t_s."""
        return self.num_transfers * self.degree * self.transfer.seconds

    @property
    def device_seconds(self) -> float:
        """All experts, undisturbed: r·t_e."""
        return self.degree * self.compute.seconds

    @property
    def copy_seconds(self) -> float:
        """All copies, undisturbed."""
        return self.degree * self.copies.seconds

    @property
    def work_seconds(self) -> float:
        """All transfers, experts and copies one after another."""
        return self.link_seconds + self.device_seconds + self.copy_seconds

    @property
    def critical_link_seconds(self) -> float:
        """Transfers on the critical path: all of them, or those at both ends."""
        ends = self.num_transfers * self.transfer.seconds
        return self.link_seconds if self._link_binds else ends

    @property
    def critical_device_seconds(self) -> float:
        """Experts on the critical path; where all-reduces bind, those of the first chunk."""
        if self._link_binds:
            return self.compute.seconds if self.num_transfers == 1 else 0.0
        return self.device_seconds

    @property
    def parts(self) -> tuple[Estimate, ...]:
        """The estimates behind the phase."""
        return self.transfer, self.compute, self.copies

    @property
    def _link_binds(self) -> bool:
        if self.num_transfers == 1:
            return self.transfer.seconds >= self.compute.seconds
        ends = self.num_transfers * self.transfer.seconds
        return self.link_seconds >= ends + self.device_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Both phases of one step, and the overhead around them."""

    forward: PhaseTime
    backward: PhaseTime
    overhead: Estimate
    strategy: Strategy = "none"

    @property
    def degree(self) -> int:
        """Chunks of either phase."""
        return self.forward.degree

    @property
    def is_reused(self) -> bool:
        """Whether the step reuses memory, which one chunk never does."""
        return self.strategy != "none" and self.degree > 1

    @property
    def seconds(self) -> float:
        """The whole step of the layer."""
        return self.forward.seconds + self.backward.seconds + self.overhead.seconds

    @property
    def work_seconds(self) -> float:
        """Both phases' transfers, experts and copies behind one another."""
        return self.forward.work_seconds + self.backward.work_seconds

    @property
    def hidden_seconds(self) -> float:
        """Work that overlapping saves; negative where it costs time."""
        return self.work_seconds - self.forward.seconds - self.backward.seconds

    @property
    def all_seconds(self) -> tuple[float, float, float]:
        """All transfers, experts and copies of the step, undisturbed."""
        phases = (self.forward, self.backward)
        return (
            sum(phase.link_seconds for phase in phases),
            sum(phase.device_seconds for phase in phases),
            sum(phase.copy_seconds for phase in phases),
        )

    @property
    def critical_seconds(self) -> tuple[float, float]:
        """Transfers and experts on the critical path."""
        phases = (self.forward, self.backward)
        link = sum(phase.critical_link_seconds for phase in phases)
        return link, sum(phase.critical_device_seconds for phase in phases)

    @property
    def binding(self) -> Binding:
        """What takes most of the critical path; where memory is reused, the busiest."""
        link, device, copies = (*self.critical_seconds, 0.0)
        if self.is_reused:
            link, device, copies = self.all_seconds
        if copies > max(link, device):
            return "copies"
        return "communication" if link > device else "computation"

    @property
    def trust(self) -> Trust:
        """The least trust in any number; the overhead counts only above `OVERHEAD_SHARE`."""
        return least_trust(part.trust for part in self._parts())

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """Operations behind the same numbers that were not measured, each once."""
        return doubts_of(self._parts())

    def _parts(self) -> list[Estimate]:
        phases = (self.forward, self.backward)
        parts = [part for phase in phases for part in phase.parts]
        if self.overhead.seconds > OVERHEAD_SHARE * self.seconds:
            parts.append(self.overhead)
        return parts


def phase_time(
    *,
    costs: LayerCosts,
    phase: Phase,
    tokens: float,
    degree: int,
    order: Order = "dispatch_first",
    strategy: Strategy = "none",
    seconds: float | None = None,
) -> PhaseTime:
    """Return the predicted time of one phase with `tokens` on each rank.

    Strategy "none" takes the closed form. Where memory is reused, the fluid timeline is simulated;
    the link then always interleaves, whatever `order` is.

    Args:
        tokens, degree: r chunks; or arrays of both.
        seconds: of a phase that reuses memory, where it was simulated before.

    Raises:
        ProfileError: an operation was not measured.
    """
    if strategy != "none":
        return _reused_time(costs, phase, tokens, degree, strategy, seconds)
    return costs.remembered(
        (phase, key_of(tokens), key_of(degree), order),
        lambda: _closed_time(costs, phase, tokens, degree, order),
    )


@np.errstate(over="ignore", invalid="ignore")
def phase_seconds(
    *, costs: LayerCosts, phase: Phase, tokens: Ints, degrees: Ints, order: Order,
    strategy: Strategy,
) -> Floats:  # fmt: skip
    """Return the seconds of `phase_time` in many cases; ArithmeticError where not finite."""
    time = phase_time(
        costs=costs, phase=phase, tokens=array_of(tokens), degree=cast("int", degrees),
        order=order, strategy=strategy,
    )  # fmt: skip
    seconds = floats_of(time.seconds)
    if not np.isfinite(seconds).all():
        raise ArithmeticError("the times of a phase are no finite numbers")
    return seconds


def _closed_time(
    costs: LayerCosts, phase: Phase, tokens: float, degree: int, order: Order
) -> PhaseTime:
    rows = costs.rows(tokens, degree=degree)
    factor = costs.step_factor(rows=rows, degree=degree)
    transfer = costs.transfer(rows=rows, degree=degree).scaled(factor)
    compute = costs.compute(phase=phase, rows=rows).scaled(factor)
    speeds = costs.speeds(rows=rows, transfer_seconds=transfer.seconds)
    closed_form = tensor_parallel_makespan if costs.is_tensor else partial(makespan, order=order)
    seconds = closed_form(
        degree=degree,
        transfer_seconds=transfer.seconds,
        compute_seconds=compute.seconds,
        comm_speed=speeds.comm,
        comp_speed=speeds.comp,
    )
    return PhaseTime(
        degree=degree,
        seconds=seconds,
        transfer=transfer,
        compute=compute,
        num_transfers=costs.num_transfers,
    )


def _reused_time(
    costs: LayerCosts, phase: Phase, tokens: float, degree: int, strategy: Strategy,
    seconds: float | None,
) -> PhaseTime:  # fmt: skip
    rows = costs.rows(tokens, degree=degree)
    chunk = chunk_of(costs=costs, phase=phase, strategy=strategy, rows=rows, degree=degree)
    if seconds is None:
        shape = np.broadcast_shapes(np.shape(degree), *map(np.shape, chunk.durations))
        makespans = reused_seconds(
            chunk=chunk, phase=phase, degrees=np.broadcast_to(degree, shape or 1),
            interference=costs.interference(rows=rows, degree=degree),
        )  # fmt: skip
        seconds = as_number(makespans.reshape(shape))
    return PhaseTime(
        degree=degree,
        seconds=seconds,
        transfer=chunk.transfer,
        compute=chunk.compute,
        copies=chunk.copies,
        num_transfers=chunk.num_transfers,
    )


def phase_tasks(time: PhaseTime, order: Order) -> list[Task]:
    """Return the simulator's tasks of a phase without reuse, whose makespan is a closed form."""
    transfers = [time.transfer.seconds] * time.degree
    computes = [time.compute.seconds] * time.degree
    if time.num_transfers == 1:
        return tensor_parallel_tasks(compute_seconds=computes, reduce_seconds=transfers)
    return pipeline_tasks(
        dispatch_seconds=transfers, compute_seconds=computes, combine_seconds=transfers, order=order
    )


def step_time(
    *,
    costs: LayerCosts,
    tokens: int,
    degree: int,
    order: Order = "dispatch_first",
    strategy: Strategy = "none",
) -> StepTime:
    """Return the predicted time of one step; one chunk, which reuses no memory, is "none"."""
    forward, backward = (
        phase_time(
            costs=costs, phase=phase, tokens=tokens, degree=degree, order=order,
            strategy="none" if degree == 1 else strategy,
        )
        for phase in PHASES
    )  # fmt: skip
    return StepTime(
        forward=forward,
        backward=backward,
        overhead=costs.overhead(tokens=tokens),
        strategy=strategy,
    )
