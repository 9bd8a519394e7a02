"""The terms behind a layer's plan, read from the candidates that were ranked for it."""

from moetune.domain.terms import PhaseTerms, StrategyTerms
from moetune.solve.layer.memory import total_bytes
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.strategies import Contender, RankedLayer, all_contenders
from moetune.solve.layer.times import PhaseTime, paper_seconds
from moetune.solve.layer.words import explain_strategy_loss


def phase_terms(phase: PhaseTime) -> PhaseTerms:
    """Return the terms of one phase."""
    return PhaseTerms(
        degree=phase.degree,
        seconds=phase.seconds,
        gathering_seconds=phase.gathering.seconds,
        transfer_seconds=phase.transfer.seconds,
        compute_seconds=phase.compute.seconds,
        total_transfer_seconds=phase.link_seconds,
        total_compute_seconds=phase.device_seconds,
        exposed_communication_seconds=max(0.0, phase.seconds - phase.device_seconds),
        hidden_seconds=max(0.0, phase.work_seconds - phase.seconds),
        transfer_trust=phase.transfer.trust,
        compute_trust=phase.compute.trust,
    )


def strategy_terms(ranked: RankedLayer) -> tuple[StrategyTerms, ...]:
    """Return one row for each memory strategy whose operations were measured.

    None in tensor parallelism, where no memory is reused. Where the caller pinned the strategy,
    the others are ranked now, with the caller's other pins.

    Raises:
        ProfileError: the profile lacks an operation of the layer.
    """
    best = ranked.best
    if best.budget.workload.expert_parallel == "tensor":
        return ()
    contenders = all_contenders(ranked)
    paper = {
        one.strategy: paper_seconds(costs=best.costs, strategy=one.strategy, tokens=best.tokens)
        for one in contenders
    }
    reusing = [one for one in paper if one != "none"]
    paper_choice = min(reusing, key=lambda one: paper[one], default=None)
    return tuple(
        _row(
            ranked,
            one,
            paper_seconds=paper[one.strategy],
            is_paper_choice=one.strategy == paper_choice,
        )
        for one in contenders
    )


def _row(
    ranked: RankedLayer, one: Contender, *, paper_seconds: float, is_paper_choice: bool
) -> StrategyTerms:
    needed_bytes, budget = total_bytes(one.memory), ranked.best.budget
    forward_degree, backward_degree = one.step.degrees
    peak = peak_bytes(
        workload=budget.workload,
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        strategy=one.strategy,
    )
    is_chosen = one.strategy == ranked.best.strategy
    lost = explain_strategy_loss(
        other=one.step,
        needed_bytes=needed_bytes,
        limit_bytes=budget.limit_bytes,
        best=ranked.step,
    )
    return StrategyTerms(
        strategy=one.strategy,
        forward_degree=forward_degree,
        backward_degree=backward_degree,
        step_seconds=one.step.seconds,
        needed_bytes=needed_bytes,
        peak_bytes=peak.device_bytes,
        host_bytes=peak.host_bytes,
        saving_ratio=one.memory.saving_ratio,
        fits=one.fits,
        is_chosen=is_chosen,
        paper_seconds=paper_seconds,
        is_paper_choice=is_paper_choice,
        lost_because="" if is_chosen else lost,
    )
