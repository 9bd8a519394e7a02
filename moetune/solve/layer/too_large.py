"""What would fit where a layer does not: other chunks, fewer tokens or experts, more ranks."""

from collections.abc import Sequence
from dataclasses import replace

from moetune.domain.constraints import Bounds, Strategy
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import Workload
from moetune.domain.layout import divisors
from moetune.domain.plan import Memory
from moetune.domain.units import format_bytes
from moetune.solve.layer.memory import MemoryBudget, total_bytes


def too_large(
    budget: MemoryBudget, allowed: Sequence[Strategy], bounds: Bounds
) -> InfeasiblePlanError:
    """Return the error of a layer that fits with no allowed strategy, and what would fit."""
    strategy, degrees, memory = _smallest(budget, allowed, bounds)
    needed = total_bytes(memory)
    chunks = f"{degrees[0]} and {degrees[1]} chunks, strategy {strategy}"
    return InfeasiblePlanError(
        f"memory binds: the smallest plan ({chunks}) needs {format_bytes(needed)} per device "
        f"(states {format_bytes(memory.state_bytes)}, activations "
        f"{format_bytes(memory.activation_bytes)}, buffers {format_bytes(memory.buffer_bytes)}), "
        f"{format_bytes(needed - budget.limit_bytes)} more than the limit of "
        f"{format_bytes(budget.limit_bytes)}",
        _what_would_fit(budget, strategy, degrees, bounds),
    )


def _smallest(
    budget: MemoryBudget, allowed: Sequence[Strategy], bounds: Bounds
) -> tuple[Strategy, tuple[int, int], Memory]:
    """Return the plan with the least memory: one chunk, or as many as may be with reuse."""
    most = bounds.largest(budget.workload.tokens_per_rank)
    choices = []
    for strategy in reversed(allowed):  # all that reuse take as much; S4 takes no host memory
        for degree in (1, most):
            degrees = bounds.forward_degree or degree, bounds.backward_degree or degree
            choices.append((strategy, degrees, budget.memory(strategy=strategy, degrees=degrees)))
    return min(choices, key=lambda choice: total_bytes(choice[2]))


def _what_would_fit(
    budget: MemoryBudget, strategy: Strategy, degrees: tuple[int, int], bounds: Bounds
) -> str:
    tokens = budget.workload.tokens_per_rank
    free = replace(bounds, forward_degree=None, backward_degree=None, strategy=None)
    if free != bounds:
        nearest: tuple[Strategy, ...] = ("none", "S4")  # least work first, then least memory
        for one in nearest[:1] if budget.shrinks_with_chunks else nearest:
            name, chunks, memory = _smallest(budget, [one], free)
            if total_bytes(memory) <= budget.limit_bytes:
                return f"nearest: {chunks[0]} and {chunks[1]} chunks with strategy {name}"
    most = budget.most_tokens(strategy=strategy, degrees=degrees)
    if most >= 1:
        return f"nearest: {most} tokens per rank instead of {tokens}"
    return _other_sizes_that_fit(budget, strategy, degrees)


def _other_sizes_that_fit(
    budget: MemoryBudget, strategy: Strategy, degrees: tuple[int, int]
) -> str:
    """Return the fewest ranks, and the most experts, with which so many tokens fit."""
    workload, layer = budget.workload, budget.workload.layer

    def fits(other: Workload) -> bool:
        return replace(budget, workload=other).fits(strategy=strategy, degrees=degrees)

    sizes = [one for one in divisors(layer.num_experts) if one > workload.world_size]
    ranks = next((one for one in sizes if fits(replace(workload, world_size=one))), None)
    fewer = [
        one
        for one in reversed(divisors(layer.num_experts))
        if one % workload.world_size == 0
        and one >= layer.top_k
        and fits(replace(workload, layer=replace(layer, num_experts=one)))
    ]
    found = [] if ranks is None else [f"on {ranks} ranks (--world-size {ranks})"]
    if fewer:
        found.append(
            f"with {fewer[0]} of its {layer.num_experts} experts on {workload.world_size}: moetune "
            f"plan --d-model {layer.d_model} --d-hidden {layer.d_hidden} --num-experts {fewer[0]} "
            f"--top-k {layer.top_k} --activation {layer.activation} "
            f"--tokens {workload.tokens_per_rank}"
        )
    if not found:
        return "no number of tokens fits: allow more memory, or take a smaller layer"
    return f"no number of tokens fits; it does {', or '.join(found)}"
