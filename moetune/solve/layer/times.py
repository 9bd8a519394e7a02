"""Predicted times of phases and steps: closed forms, or simulated timelines if memory is reused."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from moetune.domain.arrays import Floats, Sizes
from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Doubt, Estimate, Trust, least_trust, scaled
from moetune.domain.layer import PHASES, Phase
from moetune.domain.plan import Binding
from moetune.solve.layer.costs import LayerCosts, key_of
from moetune.solve.layer.degree import makespan, tensor_parallel_makespan
from moetune.solve.layer.operations import NOTHING, Price, doubts_of, in_numbers, total
from moetune.solve.layer.reuse import chunk_of, reused_seconds
from moetune.solve.layer.timeline import Task, pipeline_tasks, tensor_parallel_tasks

OVERHEAD_SHARE = 0.05
"""Share of the step up to which the overhead's trust does not count."""
_NO_COPIES = Estimate(seconds=0.0, trust="measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase at one degree.

    Args:
        seconds: from the first dispatch to the last combine; in tensor parallelism from the first
            chunk's experts to the last all-reduce.
        transfer: one chunk's dispatch or combine; in tensor parallelism its all-reduce.
        num_transfers: of a chunk; 3 if it is dispatched again, 1 in tensor parallelism.
    """

    degree: int
    seconds: float
    transfer: Estimate[float]
    compute: Estimate[float]
    copies: Estimate[float] = _NO_COPIES
    num_transfers: int

    @property
    def link_seconds(self) -> float:
        """Time of all transfers, undisturbed: 2·r·t_d, or r·t_s."""
        return self.num_transfers * self.degree * self.transfer.seconds

    @property
    def device_seconds(self) -> float:
        """Time of all experts, undisturbed: r·t_e."""
        return self.degree * self.compute.seconds

    @property
    def copy_seconds(self) -> float:
        """Time of all copies, undisturbed."""
        return self.degree * self.copies.seconds

    @property
    def work_seconds(self) -> float:
        """Time of all transfers, experts and copies one after another."""
        return self.link_seconds + self.device_seconds + self.copy_seconds

    @property
    def critical_link_seconds(self) -> float:
        """Time of transfers on the critical path: all transfers, or those at both ends."""
        ends = self.num_transfers * self.transfer.seconds
        return self.link_seconds if self._link_binds else ends

    @property
    def critical_device_seconds(self) -> float:
        """Time of experts on the critical path; if all-reduces bind, that of the first chunk."""
        if self._link_binds:
            return self.compute.seconds if self.num_transfers == 1 else 0.0
        return self.device_seconds

    @property
    def parts(self) -> tuple[Estimate[float], ...]:
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
    overhead: Estimate[float]
    strategy: Strategy = "none"

    @property
    def degree(self) -> int:
        """Number of chunks of either phase."""
        return self.forward.degree

    @property
    def is_reused(self) -> bool:
        """Whether the step reuses memory, which one chunk never does."""
        return self.strategy != "none" and self.degree > 1

    @property
    def seconds(self) -> float:
        """Time of the layer's whole step."""
        return self.forward.seconds + self.backward.seconds + self.overhead.seconds

    @property
    def work_seconds(self) -> float:
        """Time of both phases' transfers, experts and copies one after another."""
        return self.forward.work_seconds + self.backward.work_seconds

    @property
    def hidden_seconds(self) -> float:
        """Time that overlap saves; negative if overlap costs time."""
        return self.work_seconds - self.forward.seconds - self.backward.seconds

    @property
    def all_seconds(self) -> tuple[float, float, float]:
        """Times of all transfers, experts and copies of the step, undisturbed."""
        phases = (self.forward, self.backward)
        return (
            sum(phase.link_seconds for phase in phases),
            sum(phase.device_seconds for phase in phases),
            sum(phase.copy_seconds for phase in phases),
        )

    @property
    def critical_seconds(self) -> tuple[float, float]:
        """Times of transfers and experts on the critical path."""
        phases = (self.forward, self.backward)
        link = sum(phase.critical_link_seconds for phase in phases)
        return link, sum(phase.critical_device_seconds for phase in phases)

    @property
    def binding(self) -> Binding:
        """The resource that takes most of the critical path; the busiest for reused memory."""
        link, device, copies = (*self.critical_seconds, 0.0)
        if self.is_reused:
            link, device, copies = self.all_seconds
        if copies > max(link, device):
            return "copies"
        return "communication" if link > device else "computation"

    @property
    def trust(self) -> Trust:
        """The least trust in any part; the overhead counts only above `OVERHEAD_SHARE`."""
        return least_trust(part.trust for part in self._parts())

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """Distinct unmeasured operations behind the parts that `trust` counts."""
        return doubts_of(self._parts())

    def _parts(self) -> list[Estimate[float]]:
        phases = (self.forward, self.backward)
        parts = [part for phase in phases for part in phase.parts]
        if self.overhead.seconds > OVERHEAD_SHARE * self.seconds:
            parts.append(self.overhead)
        return parts


class PricedPhase(NamedTuple):
    """The times of a `PhaseTime` as arrays over tokens and chunks, or over refits."""

    seconds: Floats
    transfer: Price
    compute: Price
    num_transfers: int
    copies: Price = NOTHING


def price_phase(
    *,
    costs: LayerCosts,
    phase: Phase,
    tokens: Sizes,
    degree: Sizes,
    order: Order = "dispatch_first",
    strategy: Strategy = "none",
    seconds: float | None = None,
) -> PricedPhase:
    """Return the predicted times of a phase with `tokens` on each rank.

    Strategy "none" uses the closed form. With reused memory the fluid timeline is simulated; the
    link then always interleaves, regardless of `order`.

    Args:
        tokens, degree: tokens and chunks r; or arrays of both, of one shape.
        seconds: of a phase that reuses memory, if it was simulated before.

    Raises:
        ProfileError: an operation was not measured.
    """
    tokens, degree = np.asarray(tokens, float), np.asarray(degree, float)
    if strategy != "none":
        return _reused(costs, phase, tokens, degree, strategy, seconds)
    return costs.remembered(
        (phase, key_of(tokens), key_of(degree), order),
        lambda: _closed(costs, phase, tokens, degree, order),
    )


def _closed(
    costs: LayerCosts, phase: Phase, tokens: Floats, degree: Floats, order: Order
) -> PricedPhase:
    rows = costs.rows(tokens, degree=degree)
    factor = costs.step_factor(rows=rows, degree=degree)
    transfer = scaled(costs.transfer(rows=rows, degree=degree), factor)
    compute = scaled(costs.compute(phase=phase, rows=rows), factor)
    speeds = costs.overlap_speeds(rows=rows, transfer_seconds=transfer.seconds)
    closed_form = tensor_parallel_makespan if costs.is_tensor else partial(makespan, order=order)
    seconds = closed_form(
        degree=degree,
        transfer_seconds=transfer.seconds,
        compute_seconds=compute.seconds,
        comm_speed=speeds.comm,
        comp_speed=speeds.comp,
    )
    return PricedPhase(seconds, transfer, compute, costs.num_transfers)


def _reused(
    costs: LayerCosts, phase: Phase, tokens: Floats, degree: Floats, strategy: Strategy,
    seconds: float | None,
) -> PricedPhase:  # fmt: skip
    rows = costs.rows(tokens, degree=degree)
    chunk = chunk_of(costs=costs, phase=phase, strategy=strategy, rows=rows, degree=degree)
    makespans = np.asarray(seconds)
    if seconds is None:
        shape = np.broadcast_shapes(degree.shape, *map(np.shape, chunk.durations))
        makespans = reused_seconds(
            chunk=chunk, phase=phase, degrees=np.broadcast_to(degree, shape or 1).astype(int),
            speeds=costs.speeds(rows=rows, degree=degree),
        ).reshape(shape)  # fmt: skip
    return PricedPhase(
        seconds=makespans,
        transfer=chunk.transfer,
        compute=total(chunk.before, chunk.after),
        copies=total(chunk.copy_input, chunk.copy_middle),
        num_transfers=costs.num_transfers + chunk.pattern.sends_again,
    )


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
    """Return `price_phase` for one number of tokens and one number of chunks, as floats."""
    priced = price_phase(
        costs=costs, phase=phase, tokens=tokens, degree=degree, order=order, strategy=strategy,
        seconds=seconds,
    )  # fmt: skip
    return PhaseTime(
        degree=degree,
        seconds=priced.seconds.item(),
        transfer=in_numbers(priced.transfer),
        compute=in_numbers(priced.compute),
        copies=in_numbers(priced.copies),
        num_transfers=priced.num_transfers,
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
    seconds: tuple[float | None, float | None] = (None, None),
) -> StepTime:
    """Return the predicted time of one step; one chunk reuses no memory and is priced as "none".

    Args:
        seconds: of both phases that reuse memory, if they were simulated before.
    """
    forward, backward = (
        phase_time(
            costs=costs, phase=phase, tokens=tokens, degree=degree, order=order,
            strategy="none" if degree == 1 else strategy, seconds=simulated,
        )
        for phase, simulated in zip(PHASES, seconds, strict=True)
    )  # fmt: skip
    overhead = in_numbers(costs.overhead(tokens=tokens))
    return StepTime(forward=forward, backward=backward, overhead=overhead, strategy=strategy)


def step_seconds(
    *,
    costs: LayerCosts,
    tokens: int,
    degree: int,
    order: Order = "dispatch_first",
    strategy: Strategy = "none",
) -> tuple[Floats, Floats]:
    """Return the seconds of `step_time` under each refit: of both phases, and of the overhead."""
    forward, backward = (
        price_phase(
            costs=costs, phase=phase, tokens=tokens, degree=degree, order=order,
            strategy="none" if degree == 1 else strategy,
        )
        for phase in PHASES
    )  # fmt: skip
    return forward.seconds + backward.seconds, costs.overhead(tokens=tokens).seconds
