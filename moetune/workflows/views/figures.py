"""Figures of a layer's plan: its timeline, and time against memory of its options."""

from collections.abc import Iterator, Mapping

from moetune.domain.any_plan import AnyPlan
from moetune.domain.costs import Costs
from moetune.domain.training_document import TrainingDocument
from moetune.fit.costs import costs_of
from moetune.report.plan_figures import (
    Option,
    degree_figure,
    pareto_figure,
    phases_figure,
    stacked_figure,
)
from moetune.report.section import Figure
from moetune.report.timelines import timeline_figure
from moetune.solve.predict import plan_timelines
from moetune.workflows.explain import Explanation
from moetune.workflows.options import layer_options
from moetune.workflows.views.words import kinds_of

_FEWEST_OPTIONS = 2


def layer_figures(explanation: Explanation) -> Iterator[Figure]:
    """Yield the layer's timeline; without its profile, bars of its passes."""
    plan, costs = explanation.plan, _costs(explanation)
    if costs is None:
        yield phases_figure({"this plan": plan})
        return
    forward, backward = plan_timelines(plan=plan, costs=costs)
    yield timeline_figure(forward=forward, backward=backward, title="Timeline of one step")


def compared_figures(plans: Mapping[str, AnyPlan]) -> tuple[Figure, ...]:
    """Return figures of plans of one kind side by side; none of a layer and a model."""
    models = {name: plan for name, plan in plans.items() if plan.kind == "training"}
    if len(models) == len(plans):
        return tuple(training_figures(models))
    if models:
        return ()
    layers = {name: plan.as_layer() for name, plan in plans.items()}
    return phases_figure(layers), degree_figure(layers)


def training_figures(plans: Mapping[str, TrainingDocument]) -> Iterator[Figure]:
    """Yield the plans' steps by kind of time; nothing where an older plan has one rank's parts."""
    if len(plans) == 1:
        parts = {name: plan.predicted.parts for name, plan in plans.items()}
        words = "Predicted seconds on the slowest pipeline rank."
    else:
        parts = {name: plan.best.mean_parts for name, plan in plans.items()}
        words = "Predicted seconds on the mean of the pipeline ranks."
    if all(parts.values()):
        kinds = {name: kinds_of(seconds) for name, seconds in parts.items()}
        yield stacked_figure(kinds, title="One step", words=words)


def memory_figures(explanation: Explanation) -> tuple[Figure, ...]:
    """Return time against memory, where there are at least two options."""
    options = options_of(explanation)
    if len(options) < _FEWEST_OPTIONS:
        return ()
    return (pareto_figure(options, limit_bytes=explanation.memory_limit_bytes),)


def options_of(explanation: Explanation) -> tuple[Option, ...]:
    """Return every strategy of the explanation with 1, 2, 4 … 64 chunks in both phases."""
    costs = _costs(explanation)
    if costs is None:
        return ()
    return layer_options(explanation, costs)


def _costs(explanation: Explanation) -> Costs | None:
    if explanation.profile is None:
        return None
    allowed = explanation.plan.inputs.pinned.allow_modelled
    return costs_of(explanation.profile, allow_modelled=allowed)
