"""The order in which a rank issues a phase's steps: the same on every rank, from the plan."""

from typing import Literal

from moetune.domain.plan import Order

Step = tuple[Literal["dispatch", "compute", "combine"], int]
_INTERLEAVED_LEAD = 2


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
