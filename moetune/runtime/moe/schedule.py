"""The order in which a rank issues a phase's steps: the same on every rank, from the plan."""

from typing import Literal

from moetune.domain.constraints import Order

Step = tuple[Literal["dispatch", "compute", "combine"], int]
_INTERLEAVED_LEAD = 2


def reuse_order(degree: int, *, dispatches_first: bool) -> tuple[Step, ...]:
    """Return the steps of one phase with reused memory: two dispatches ahead of the experts.

    Interleaved, or with D_{i+2} before C_i: as soon as the experts have left its buffer. The
    experts wait for the one and not for the other, so that the link may then take up to their
    whole time for one transfer, instead of for two.
    """
    if not dispatches_first:
        return issue_order(degree, "interleaved")
    steps: list[Step] = [("dispatch", chunk) for chunk in range(min(degree, _INTERLEAVED_LEAD))]
    for chunk in range(degree):
        steps.append(("compute", chunk))
        if chunk + _INTERLEAVED_LEAD < degree:
            steps.append(("dispatch", chunk + _INTERLEAVED_LEAD))
        steps.append(("combine", chunk))
    return tuple(steps)


def issue_order(degree: int, order: Order) -> tuple[Step, ...]:
    """Return the steps of one phase.

    dispatch_first: D₁ … D_r, then E₁ C₁ E₂ C₂ … (PipeMoE Eq. 9–11).
    interleaved: two dispatches ahead, then D_{i+2} behind C_i (MPipeMoE §III-B).
    """
    lead = degree if order == "dispatch_first" else min(degree, _INTERLEAVED_LEAD)
    steps: list[Step] = [("dispatch", chunk) for chunk in range(lead)]
    for chunk in range(degree):
        if order == "interleaved" and chunk and chunk + 1 < degree:
            steps.append(("dispatch", chunk + 1))
        steps += [("compute", chunk), ("combine", chunk)]
    return tuple(steps)
