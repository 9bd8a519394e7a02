"""Alternatives to a layer that does not fit: other chunks, fewer tokens or experts, more ranks."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.constraints import Strategy
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import Workload
from moetune.domain.layout import divisors
from moetune.domain.routing import LayerRouting
from moetune.domain.units import format_bytes
from moetune.solve.layer.budget import Degrees, MemoryBudget
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.peak import Peak
from moetune.solve.layer.words import count_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    strategy: Strategy
    degrees: Degrees
    peak: Peak

    @property
    def num_bytes(self) -> int:
        return self.peak.device_bytes


def too_large(
    budget: MemoryBudget, allowed: Sequence[Strategy], chooser: DegreeChooser
) -> InfeasiblePlanError:
    """Return the error of a layer that fits with no allowed strategy, and what would fit.

    Args:
        chooser: of any strategy, for its bounds.
    """
    smallest = _smallest(budget, allowed, chooser, budget.workload.tokens_per_rank)
    peak, degrees = smallest.peak, smallest.degrees
    return InfeasiblePlanError(
        f"memory binds: the smallest plan ({degrees[0]} and {count_chunks(degrees[1])}, strategy "
        f"{smallest.strategy}) peaks at {format_bytes(peak.device_bytes)} per device "
        f"(states {format_bytes(peak.state_bytes)}, activations "
        f"{format_bytes(peak.activation_bytes)}, buffers "
        f"{format_bytes(peak.buffer_bytes + peak.ring_bytes + peak.routing_bytes)}), "
        f"{format_bytes(peak.device_bytes - budget.limit_bytes)} more than the limit of "
        f"{format_bytes(budget.limit_bytes)}",
        _what_would_fit(budget, smallest, allowed, chooser),
    )


def _smallest(
    budget: MemoryBudget, allowed: Sequence[Strategy], chooser: DegreeChooser, tokens: int
) -> _Choice:
    """Return the plan with the smallest peak; of equal ones that with the least work."""
    choices = []
    for strategy in allowed:
        degrees = replace(chooser, strategy=strategy, budget=budget).least(tokens)
        peak = budget.peak(strategy=strategy, degrees=degrees, tokens=tokens)
        choices.append(_Choice(strategy=strategy, degrees=degrees, peak=peak))
    return min(choices, key=lambda choice: choice.num_bytes)


def _what_would_fit(
    budget: MemoryBudget, smallest: _Choice, allowed: Sequence[Strategy], chooser: DegreeChooser
) -> str:
    planned = budget.workload.tokens_per_rank
    bounds = replace(chooser.bounds, forward_degree=None, backward_degree=None, strategy=None)
    if bounds != chooser.bounds:
        free = replace(chooser, bounds=bounds)
        nearest: tuple[Strategy, ...] = ("none", "S4")  # least work first, then least memory
        for strategy in nearest[:1] if budget.keeps_all else nearest:
            choice = _smallest(budget, [strategy], free, planned)
            if choice.num_bytes <= budget.limit_bytes:
                chunks = f"{choice.degrees[0]} and {count_chunks(choice.degrees[1])}"
                return f"nearest: {chunks} with strategy {strategy}"
    most = bisect_left(
        range(1, planned), True,  # noqa: FBT003 - looked for, no switch
        key=lambda tokens: _smallest(budget, allowed, chooser, tokens).num_bytes
        > budget.limit_bytes,
    )  # fmt: skip
    if most >= 1:
        return f"nearest: {most} tokens per rank instead of {planned}"
    return _other_sizes_that_fit(budget, smallest)


def _other_sizes_that_fit(budget: MemoryBudget, smallest: _Choice) -> str:
    """Return the fewest ranks, and the most experts, with which so many tokens fit."""
    workload, layer = budget.workload, budget.workload.layer

    def fits(other: Workload) -> bool:
        there = replace(budget, workload=other)
        return there.fits(strategy=smallest.strategy, degrees=smallest.degrees)

    sizes = [one for one in divisors(layer.num_experts) if one > workload.world_size]
    ranks = next((one for one in sizes if fits(replace(workload, world_size=one))), None)
    fewer = [
        one
        for one in reversed(divisors(layer.num_experts))
        if one % workload.world_size == 0
        and one >= layer.top_k
        and fits(_with_experts(workload, one))
    ]
    found = [] if ranks is None else [f"on {ranks} ranks (--world-size {ranks})"]
    if fewer:
        there = _with_experts(workload, fewer[0])
        evenly = ", loaded evenly" if workload.routing and not there.routing else ""
        found.append(
            f"with {fewer[0]} of its {layer.num_experts} experts on {workload.world_size}{evenly}: "
            f"moetune plan {' '.join(_flags(there))}"
        )
    if not found:
        return "no number of tokens fits: allow more memory, or take a smaller layer"
    return f"no number of tokens fits; it does {', or '.join(found)}"


def _with_experts(workload: Workload, num_experts: int) -> Workload:
    """Return the workload with another number of experts, of which no loads were recorded.

    A law of loads holds for every number of them.
    """
    if num_experts == workload.layer.num_experts:
        return workload
    is_law = LayerRouting.of(workload.routing).loads.loads is None
    return replace(
        workload, layer=replace(workload.layer, num_experts=num_experts),
        routing=workload.routing if is_law else "", placement=(),
    )  # fmt: skip


def _flags(workload: Workload) -> Iterator[str]:
    """Yield the flags of a plan for the workload."""
    layer = workload.layer
    yield f"--d-model {layer.d_model} --d-hidden {layer.d_hidden}"
    yield f"--num-experts {layer.num_experts} --top-k {layer.top_k}"
    yield f"--activation {layer.activation} --tokens {workload.tokens_per_rank}"
    yield f"--world-size {workload.world_size} --dtype {workload.dtype}"
    if workload.expert_parallel == "tensor":
        yield f"--expert-parallel tensor{workload.sequence_parallel * ' --sequence-parallel'}"
    if workload.routing:
        yield f"--routing {workload.routing}"
