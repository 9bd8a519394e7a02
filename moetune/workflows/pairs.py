"""Chances that one of two choices is the faster one, under refits of the measurements."""

from dataclasses import replace

from moetune.domain.constraints import LayoutPins
from moetune.domain.model import Transformer
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.fit.model_error import OF_MODELS
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.uncertainty import TimedChoice, chance_of_faster
from moetune.solve.layout.choose import ChosenLayout, choose_layout
from moetune.solve.layout.uncertainty import judge_layout
from moetune.solve.predict import plan_step
from moetune.workflows.plan import drawn_costs, layout_problem


def probability_faster(chosen: Plan, other: Plan, profile: Profile) -> float:
    """Return the share of refits under which the other plan's step is the shorter one.

    Args:
        chosen, other: of one layer or one model, made with the profile.
    """
    whole = chosen.inputs.request.whole
    modelled = other.inputs.pinned.allow_modelled
    resamples = drawn_costs(profile, allow_modelled=modelled)
    if whole is None:
        return chance_of_faster(
            timed_choice(chosen, profile),
            timed_choice(other, profile),
            resamples=resamples,
            tokens=chosen.inputs.tokens_per_rank,
        )
    first, second = (chosen_layout(one, whole, profile) for one in (chosen, other))
    both = (first.found.best[0], second.found.best[0])
    return 1.0 - judge_layout(first.search, both, resamples, OF_MODELS).probability_best


def timed_choice(plan: Plan, profile: Profile) -> TimedChoice:
    """Return a layer's choice with its nominal time, as this version of moetune predicts it."""
    decision = plan.decide(plan.inputs.tokens_per_rank)
    costs = costs_of(profile, allow_modelled=plan.inputs.pinned.allow_modelled)
    return TimedChoice(
        costs=layer_costs(workload=plan.workload, costs=costs),
        step=plan_step(plan=plan, costs=costs, decision=decision),
        order=decision.order,
    )


def chosen_layout(plan: Plan, whole: Transformer, profile: Profile) -> ChosenLayout:
    """Return the search of a model's plan, with its layout and micro-batch pinned."""
    transformer, layout = plan.transformer, plan.layout
    assert transformer is not None  # noqa: S101 - the plan is of a whole model
    problem = layout_problem(plan.inputs, whole, profile)
    pins = LayoutPins(
        dp=layout.dp, ep=layout.ep, tp=layout.tp, pp=layout.pp,
        expert_parallel=layout.expert_parallel,
        micro_batch=transformer.micro_batch_sequences,
        zero=transformer.zero if layout.dp > 1 else None,
        offload=plan.chunks.offload if plan.chunks else problem.pins.offload,
        overlap=problem.pins.overlap,
    )  # fmt: skip
    return choose_layout(replace(problem, pins=pins))
