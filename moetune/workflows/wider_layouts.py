"""A decoder's layouts beyond branch and bound, where a plan is asked to try some."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from moetune.domain.training import LayoutRequest
from moetune.search import LayoutStudy
from moetune.solve.joint.search import FoldedSearch
from moetune.workflows.training_plan import TrainingPlan

GoesOn: TypeAlias = Callable[[int], bool]
"""Told how many layouts were tried; returns whether to go on."""


def widened(
    plan: TrainingPlan, search: FoldedSearch, pins: LayoutRequest, goes_on: GoesOn
) -> TrainingPlan:
    """Return the plan with a better layout if there is one among so many that are tried.

    It is never worse than the plan. Where the search is stopped, the plan is that of as many tries.

    Args:
        plan: of branch and bound, whether it fits or not; its request says how many to try.
        pins: that layouts obey.
    """
    if plan.placement is not None:  # which is for the ranks that the layout has
        pins = replace(pins, ep=plan.best.layout.ep)
    study = LayoutStudy(search, pins, (*plan.found, *plan.front))
    num_tried = 0
    while num_tried < plan.request.search_trials and goes_on(num_tried):
        study.try_next()
        num_tried += 1
    request = replace(plan.request, search_trials=num_tried)
    if not num_tried:
        return replace(plan, request=request)
    return replace(
        plan,
        request=request,
        found=tuple(study.ranked()) or plan.found,
        front=study.front(plan.front) if plan.front else (),
        bounded_step_seconds=plan.best.step.seconds if plan.fits else None,
    )
