"""Every memory strategy of a plan's layer beside the others: bytes, seconds, and why it lost."""

from dataclasses import dataclass

from moetune.domain.layer import Workload
from moetune.domain.plan import Plan, Strategy
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.choice import recorded_bounds
from moetune.solve.eq10 import paper_seconds
from moetune.solve.memory import total_bytes
from moetune.solve.peak import peak_bytes
from moetune.solve.phases import layer_costs
from moetune.solve.room import taken_bytes
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

    Raises:
        ProfileError: the profile lacks an operation of the plan.
    """
    constraints = plan.inputs.constraints
    costs = layer_costs(
        workload=workload, costs=costs_of(profile, allow_modelled=ALLOW_MODELLED in constraints)
    )
    limit = plan.inputs.memory_limit_bytes
    limit = profile.machine.memory_bytes if limit is None else limit
    limit -= taken_bytes(constraints)
    found = choose_strategy(
        workload=workload,
        costs=costs,
        bounds=recorded_bounds(constraints),
        limit_bytes=limit,
    )
    paper = {
        one.strategy: paper_seconds(
            costs=costs, strategy=one.strategy, tokens=workload.tokens_per_rank
        )
        for one in found.contenders
    }
    papers_choice = min((one for one in paper if one != "none"), key=lambda one: paper[one])
    chosen = next(one for one in found.contenders if one.strategy == plan.memory.strategy)

    def terms(one: Contender) -> StrategyTerms:
        lost = "" if one is chosen else explain_strategy_loss(
            other=one.step,
            needed_bytes=total_bytes(one.memory),
            limit_bytes=limit,
            best=chosen.step,
        )  # fmt: skip
        peak = peak_bytes(
            workload=workload,
            forward_degree=one.step.forward.degree,
            backward_degree=one.step.backward.degree,
            strategy=one.strategy,
        )
        return StrategyTerms(
            strategy=one.strategy,
            forward_degree=one.step.forward.degree,
            backward_degree=one.step.backward.degree,
            step_seconds=one.step.seconds,
            needed_bytes=total_bytes(one.memory),
            peak_bytes=peak.device_bytes,
            host_bytes=peak.host_bytes,
            saving_ratio=one.memory.saving_ratio,
            fits=one.fits,
            is_chosen=one is chosen,
            paper_seconds=paper[one.strategy],
            is_paper_choice=one.strategy == papers_choice,
            lost_because=lost,
        )

    return tuple(map(terms, found.contenders))
