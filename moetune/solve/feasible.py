"""Whether any plan exists, and if not, which constraint forbids it and what comes nearest."""

from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import Workload
from moetune.domain.units import format_bytes
from moetune.solve.choice import Bounds
from moetune.solve.memory import layer_memory, tokens_that_fit, total_bytes
from moetune.solve.phases import PHASES


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


def check_memory(*, workload: Workload, bounds: Bounds, limit_bytes: int) -> None:
    """Raise InfeasiblePlanError where even the smallest plan that the pins allow is too large."""
    pinned = max(bounds.forward_degree or 1, bounds.backward_degree or 1)
    memory = layer_memory(workload=workload, forward_degree=pinned, backward_degree=pinned)
    if total_bytes(memory) <= limit_bytes:
        return
    raise InfeasiblePlanError(
        f"memory binds: the smallest plan needs {format_bytes(total_bytes(memory))} per device "
        f"(states {format_bytes(memory.state_bytes)}, activations "
        f"{format_bytes(memory.activation_bytes)}, buffers {format_bytes(memory.buffer_bytes)}), "
        f"the limit is {format_bytes(limit_bytes)}",
        _nearest(workload, limit_bytes, is_pipelined=pinned > 1),
    )


def _nearest(workload: Workload, limit_bytes: int, *, is_pipelined: bool) -> str:
    fit = tokens_that_fit(workload=workload, limit_bytes=limit_bytes, pipelined=is_pipelined)
    whole = tokens_that_fit(workload=workload, limit_bytes=limit_bytes, pipelined=False)
    if is_pipelined and whole >= workload.tokens_per_rank:
        return "nearest: degree 1 forward and backward, whose buffers are smaller"
    if fit >= 1:
        return f"nearest: {fit} tokens per rank instead of {workload.tokens_per_rank}"
    return "no number of tokens fits: spread the experts over more ranks, or allow more memory"
