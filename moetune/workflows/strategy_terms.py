"""Every memory strategy of a plan's layer beside the others: bytes, seconds, and why it lost."""

from collections.abc import Mapping
from dataclasses import dataclass

from moetune.domain.layer import Workload
from moetune.domain.plan import Plan
from moetune.domain.plan_inputs import Strategy
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.choice import recorded_bounds
from moetune.solve.eq10 import paper_seconds
from moetune.solve.layer_costs import layer_costs
from moetune.solve.memory import total_bytes
from moetune.solve.peak import peak_bytes
from moetune.solve.room import limit_of
from moetune.solve.strategies import Contender, choose_strategy
from moetune.solve.words import explain_strategy_loss
from moetune.workflows.plan import ALLOW_MODELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyTerms:
    """One strategy at its best; where nothing of it fits, at its fastest.

    Args:
        needed_bytes: on the device: states, activations and buffers, by Eq. 1 to 6.
        peak_bytes: of a step as the layer runs it, with rings and routing data.
        host_bytes: activations that wait in host memory.
        paper_seconds: MPipeMoE's Eq. 10.
        is_paper_choice: whether Eq. 10 would take it, among those that reuse memory.
        lost_because: empty for the plan's own.
    """

    strategy: Strategy
    forward_degree: int
    backward_degree: int
    step_seconds: float
    needed_bytes: int
    peak_bytes: int
    host_bytes: int
    saving_ratio: float
    fits: bool
    is_chosen: bool
    paper_seconds: float
    is_paper_choice: bool
    lost_because: str


def strategies_of(plan: Plan, *, profile: Profile, workload: Workload) -> tuple[StrategyTerms, ...]:
    """Return all strategies that have a price, solved with the plan's pins but for its strategy.

    None of a tensor-parallel layer, which reuses no memory.

    Raises:
        ProfileError: the profile lacks an operation of the plan.
    """
    if workload.expert_parallel == "tensor":
        return ()
    constraints = plan.inputs.constraints
    costs = layer_costs(
        workload=workload, costs=costs_of(profile, allow_modelled=ALLOW_MODELLED in constraints)
    )
    limit = limit_of(plan.inputs, device_memory_bytes=profile.machine.memory_bytes)
    contenders = choose_strategy(
        workload=workload,
        costs=costs,
        bounds=recorded_bounds(constraints),
        limit_bytes=limit,
    ).contenders
    paper = {
        one.strategy: paper_seconds(
            costs=costs, strategy=one.strategy, tokens=workload.tokens_per_rank
        )
        for one in contenders
    }
    choices = _Choices(
        chosen=next(one for one in contenders if one.strategy == plan.memory.strategy),
        paper=paper,
        papers_choice=min((one for one in paper if one != "none"), key=lambda one: paper[one]),
        limit_bytes=limit,
    )
    return tuple(_terms(one, choices, workload) for one in contenders)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """What each strategy is held against.

    Args:
        paper: Eq. 10 of each.
    """

    chosen: Contender
    paper: Mapping[Strategy, float]
    papers_choice: Strategy
    limit_bytes: int


def _terms(one: Contender, choices: _Choices, workload: Workload) -> StrategyTerms:
    needed = total_bytes(one.memory)
    forward_degree, backward_degree = one.step.degrees
    lost = explain_strategy_loss(
        other=one.step,
        needed_bytes=needed,
        limit_bytes=choices.limit_bytes,
        best=choices.chosen.step,
    )
    peak = peak_bytes(
        workload=workload,
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        strategy=one.strategy,
    )
    return StrategyTerms(
        strategy=one.strategy,
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        step_seconds=one.step.seconds,
        needed_bytes=needed,
        peak_bytes=peak.device_bytes,
        host_bytes=peak.host_bytes,
        saving_ratio=one.memory.saving_ratio,
        fits=one.fits,
        is_chosen=one is choices.chosen,
        paper_seconds=choices.paper[one.strategy],
        is_paper_choice=one.strategy == choices.papers_choice,
        lost_because="" if one is choices.chosen else lost,
    )
