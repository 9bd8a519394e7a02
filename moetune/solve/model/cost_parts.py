"""Parts of a model's blocks, and of its first and last stage: what each takes of both passes."""

from dataclasses import dataclass

from moetune.domain.costs import Estimate
from moetune.domain.layer import ExpertParallel
from moetune.domain.model_plan import PartName
from moetune.solve.layer.operations import NOTHING
from moetune.solve.layer.times import PhaseTime, StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPart:
    """One part of a block, or of the first or the last stage."""

    name: PartName
    forward: Estimate
    backward: Estimate

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """Everything but the experts.

    Args:
        attention: of every block, with its all-reduce and norms.
        ffn: of a block without experts, with its all-reduce and launches.
        first, last: of the first and the last stage: embedding; head and loss.
    """

    attention: tuple[CostPart, ...]
    ffn: tuple[CostPart, ...]
    first: tuple[CostPart, ...]
    last: tuple[CostPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeParts:
    """One MoE layer at its best degrees."""

    step: StepTime
    parts: tuple[CostPart, ...]


def experts_part(step: StepTime) -> CostPart:
    """Return the experts' part: the time of the device in one layer's step."""
    forward, backward = (
        phase.compute._replace(seconds=phase.device_seconds)
        for phase in (step.forward, step.backward)
    )
    return CostPart(name="experts", forward=forward, backward=backward)


def links(step: StepTime, expert_parallel: ExpertParallel) -> tuple[CostPart, ...]:
    """Return the communication of one layer that its experts do not hide."""
    forward, backward = _exposed(step.forward), _exposed(step.backward)
    if expert_parallel == "tensor":
        return (CostPart(name="MoE all_reduce", forward=forward, backward=backward),)
    forward, backward = (one._replace(seconds=one.seconds / 2) for one in (forward, backward))
    return (
        CostPart(name="first all_to_all", forward=forward, backward=backward),
        CostPart(name="second all_to_all", forward=forward, backward=backward),
    )


def _exposed(phase: PhaseTime) -> Estimate:
    if not phase.transfer.seconds:
        return NOTHING
    return phase.transfer._replace(seconds=phase.seconds - phase.device_seconds)
