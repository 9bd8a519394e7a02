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
from moetune.workflows.options import layer_options
from moetune.workflows.subjects.layer import LayerSubject
from moetune.workflows.subjects.model import kinds_of

_FEWEST_OPTIONS = 2


def layer_figures(subject: LayerSubject) -> Iterator[Figure]:
    """Yield the layer's timeline; without its profile, bars of its passes."""
    plan, costs = subject.plan, _costs(subject)
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


def memory_figures(subject: LayerSubject) -> tuple[Figure, ...]:
    """Return time against memory, where there are at least two options."""
    options = options_of(subject)
    if len(options) < _FEWEST_OPTIONS:
        return ()
    return (pareto_figure(options, limit_bytes=subject.memory_limit_bytes),)


def options_of(subject: LayerSubject) -> tuple[Option, ...]:
    """Return every strategy of the subject with 1, 2, 4 … 64 chunks in both phases."""
    costs = _costs(subject)
    if costs is None:
        return ()
    return layer_options(subject, costs)


def _costs(subject: LayerSubject) -> Costs | None:
    if subject.profile is None:
        return None
    allowed = subject.plan.inputs.pinned.allow_modelled
    return costs_of(subject.profile, allow_modelled=allowed)
