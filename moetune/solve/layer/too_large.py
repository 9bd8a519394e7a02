"""Alternatives to a layer that does not fit: other chunks, fewer tokens or experts, more ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from moetune.domain.constraints import Bounds, Strategy
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import PHASES, Workload
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
    smallest = _smallest(budget, allowed, chooser)
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


def _smallest(budget: MemoryBudget, allowed: Sequence[Strategy], chooser: DegreeChooser) -> _Choice:
    """Return the plan with the smallest peak; of equal ones that with the least work."""
    return min(_choices(budget, allowed, chooser), key=lambda one: one.num_bytes)


def _choices(
    budget: MemoryBudget, allowed: Sequence[Strategy], chooser: DegreeChooser
) -> Iterator[_Choice]:
    """Yield each strategy with as many chunks in both phases, or one in either.

    No others take less: equal ones need rows in one order, and one sums no gradients in float32.
    """
    every = range(1, chooser.bounds.largest(budget.workload.tokens_per_rank) + 1)
    wanted = [(one, one) for one in every]
    if not chooser.is_paired:
        wanted += [pair for one in every for pair in ((one, 1), (1, one))]
    forward, backward = map(chooser.pinned, PHASES)
    pairs = dict.fromkeys((forward or one, backward or other) for one, other in wanted)
    for strategy, degrees in product(allowed, pairs):
        peak = budget.peak(strategy=strategy, degrees=degrees)
        yield _Choice(strategy=strategy, degrees=degrees, peak=peak)


def _what_would_fit(
    budget: MemoryBudget, smallest: _Choice, allowed: Sequence[Strategy], chooser: DegreeChooser
) -> str:
    bounds = replace(chooser.bounds, forward_degree=None, backward_degree=None, strategy=None)
    if bounds != chooser.bounds:
        free = replace(chooser, bounds=bounds)
        nearest: tuple[Strategy, ...] = ("none", "S4")  # least work first, then least memory
        for strategy in nearest[:1] if budget.keeps_all else nearest:
            one = _smallest(budget, [strategy], free)
            if one.num_bytes <= budget.limit_bytes:
                chunks = f"{one.degrees[0]} and {count_chunks(one.degrees[1])}"
                return f"nearest: {chunks} with strategy {strategy}"
    most = _most_tokens(budget, _choices(budget, allowed, chooser), chooser.bounds)
    if most >= 1:
        return f"nearest: {most} tokens per rank instead of {budget.workload.tokens_per_rank}"
    return _other_sizes_that_fit(budget, smallest)


def _most_tokens(budget: MemoryBudget, choices: Iterator[_Choice], bounds: Bounds) -> int:
    """Return the most tokens that fit with any of the choices that so many tokens allow."""
    found = 0
    for one in choices:
        if budget.fits(strategy=one.strategy, degrees=one.degrees, tokens=found + 1):
            most = budget.most_tokens(strategy=one.strategy, degrees=one.degrees)
            found = most if max(one.degrees) <= bounds.largest(most) else found
    return found


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
