"""The time of a phase and of a step for given degrees."""

from dataclasses import dataclass

from moetune.domain.constraints import Order, Strategy
from moetune.domain.costs import Estimate, Trust, least_trust
from moetune.domain.layer import Phase
from moetune.solve.layer.costs import NOTHING, LayerCosts

OVERHEAD_SHARE = 0.05
"""Of the step, up to which what lies around the pipeline does not decide its trust."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase at one degree.

    Args:
        seconds: from the first dispatch to the last combine, or from the gathering, else the
            first chunk's experts, to the last sum.
        transfer: one chunk's dispatch or combine, or its sum.
        compute: one chunk's experts.
        copies: one chunk's copies between device and host.
        num_transfers: of a chunk; 3 where what the experts received is sent again, 1 where
            the experts' results are summed.
        gathering: of all ranks' tokens, before the first chunk.
    """

    degree: int
    seconds: float
    transfer: Estimate
    compute: Estimate
    copies: Estimate = NOTHING
    num_transfers: int = 2
    gathering: Estimate = NOTHING

    @property
    def link_seconds(self) -> float:
        """All transfers, undisturbed: 2·r·t_d, or t_g + r·t_s."""
        chunks = self.num_transfers * self.degree * self.transfer.seconds
        return self.gathering.seconds + chunks

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
        """All pieces one after another."""
        return self.link_seconds + self.device_seconds + self.copy_seconds

    @property
    def critical_link_seconds(self) -> float:
        """Transfers on the critical path: all of them, or those at both ends."""
        ends = self.gathering.seconds + self.num_transfers * self.transfer.seconds
        return self.link_seconds if self._link_binds else ends

    @property
    def critical_device_seconds(self) -> float:
        """Experts on the critical path; where the sums bind, those of the first chunk."""
        if self._link_binds:
            return self.compute.seconds if self.num_transfers == 1 else 0.0
        return self.device_seconds

    @property
    def parts(self) -> tuple[Estimate, ...]:
        """The estimates behind the phase."""
        return self.gathering, self.transfer, self.compute, self.copies

    @property
    def _link_binds(self) -> bool:
        if self.num_transfers == 1:
            return self.transfer.seconds >= self.compute.seconds
        ends = self.num_transfers * self.transfer.seconds
        return self.link_seconds >= ends + self.device_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Both phases of one step, and what lies around them."""

    forward: PhaseTime
    backward: PhaseTime
    overhead: Estimate
    strategy: Strategy = "none"

    @property
    def degrees(self) -> tuple[int, int]:
        """Chunks forward and backward."""
        return self.forward.degree, self.backward.degree

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
        parts = [part for phase in phases for part in phase.parts]
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
    gathering = costs.gathering(tokens=tokens)
    chunks_seconds = costs.makespan(
        degree=degree,
        rows=rows,
        transfer_seconds=transfer.seconds,
        compute_seconds=compute.seconds,
        order=order,
    )
    return PhaseTime(
        degree=degree,
        seconds=gathering.seconds + chunks_seconds,
        transfer=transfer,
        compute=compute,
        num_transfers=costs.num_transfers,
        gathering=gathering,
    )
