"""The time of a phase and of a step for given degrees."""

from dataclasses import dataclass

from moetune.domain.costs import Estimate, Trust, least_trust
from moetune.domain.plan import Order
from moetune.solve.degree import makespan
from moetune.solve.phases import LayerCosts, Phase

OVERHEAD_SHARE = 0.05
"""Of the step, up to which what lies around the pipeline does not decide its trust."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase at one degree.

    Args:
        seconds: from the first dispatch to the last combine.
        transfer: one chunk's dispatch or combine.
        compute: one chunk's experts.
    """

    degree: int
    seconds: float
    transfer: Estimate
    compute: Estimate

    @property
    def link_seconds(self) -> float:
        """All transfers, undisturbed: 2·r·t_d."""
        return 2 * self.degree * self.transfer.seconds

    @property
    def device_seconds(self) -> float:
        """All experts, undisturbed: r·t_e."""
        return self.degree * self.compute.seconds

    @property
    def work_seconds(self) -> float:
        """All pieces one after another."""
        return self.link_seconds + self.device_seconds

    @property
    def critical_link_seconds(self) -> float:
        """Transfers on the critical path: all of them, or the first and the last."""
        return self.link_seconds if self._link_binds else 2 * self.transfer.seconds

    @property
    def critical_device_seconds(self) -> float:
        """Experts on the critical path."""
        return 0.0 if self._link_binds else self.device_seconds

    @property
    def _link_binds(self) -> bool:
        return self.link_seconds >= 2 * self.transfer.seconds + self.device_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Both phases of one step, and what lies around them."""

    forward: PhaseTime
    backward: PhaseTime
    overhead: Estimate

    @property
    def seconds(self) -> float:
        """The whole step of the layer."""
        return self.forward.seconds + self.backward.seconds + self.overhead.seconds

    @property
    def trust(self) -> Trust:
        """The least trust in any number behind the pipelined part.

        What lies around it, often with the gate's tiny product outside all measured shapes,
        counts only where it is a share worth the name.
        """
        phases = (self.forward, self.backward)
        parts = [part for phase in phases for part in (phase.transfer, phase.compute)]
        if self.overhead.seconds > OVERHEAD_SHARE * self.seconds:
            parts.append(self.overhead)
        return least_trust(part.trust for part in parts)


def phase_time(
    *, costs: LayerCosts, phase: Phase, tokens: int, degree: int, order: Order
) -> PhaseTime:
    """Return the predicted time of one phase with `tokens` on each rank."""
    rows = tokens * costs.layer.top_k / degree
    transfer = costs.transfer(rows=rows, degree=degree)
    compute = costs.compute(phase=phase, rows=rows)
    speeds = costs.side_by_side(rows=rows, transfer_seconds=transfer.seconds)
    seconds = makespan(
        degree=degree,
        transfer_seconds=transfer.seconds,
        compute_seconds=compute.seconds,
        comm_speed=speeds.comm,
        comp_speed=speeds.comp,
        order=order,
    )
    return PhaseTime(degree=degree, seconds=seconds, transfer=transfer, compute=compute)


def step_time(
    *,
    costs: LayerCosts,
    tokens: int,
    forward_degree: int,
    backward_degree: int,
    order: Order = "dispatch_first",
) -> StepTime:
    """Return the predicted time of one step: what `verify` compares with the measured one."""
    return StepTime(
        forward=phase_time(
            costs=costs, phase="forward", tokens=tokens, degree=forward_degree, order=order
        ),
        backward=phase_time(
            costs=costs, phase="backward", tokens=tokens, degree=backward_degree, order=order
        ),
        overhead=costs.overhead(tokens=tokens),
    )
