"""Pins of a layer's degrees that nothing allows."""

from moetune.domain.constraints import Bounds
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import PHASES


def check_pins(*, bounds: Bounds, tokens: int) -> None:
    """Raise InfeasiblePlanError where a pinned degree is not among those allowed."""
    largest = bounds.largest(tokens)
    for phase in PHASES:
        pinned = bounds.pinned(phase)
        if pinned is None or pinned <= largest:
            continue
        what = f"{phase}_degree {pinned} is infeasible: "
        flag = f"--{phase}-degree"
        if pinned > bounds.max_degree:
            raise InfeasiblePlanError(
                f"{what}max_degree is {bounds.max_degree}",
                f"nearest: {flag} {largest}, or allow more with --max-degree {pinned}",
            )
        raise InfeasiblePlanError(
            f"{what}{tokens} tokens per rank in chunks of at least {bounds.min_chunk_tokens} "
            f"make at most {largest}",
            f"nearest: {flag} {largest}, or {pinned * bounds.min_chunk_tokens} tokens",
        )
