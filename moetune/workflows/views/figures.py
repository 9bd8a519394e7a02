"""Figures of a layer's plan: its timeline, and time against memory of its options."""

from collections.abc import Iterator, Mapping

from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import ProfileError
from moetune.domain.training_document import TrainingDocument
from moetune.report.plan_figures import (
    Option,
    degree_figure,
    pareto_figure,
    phases_figure,
    stacked_figure,
)
from moetune.report.section import Figure
from moetune.report.timelines import timeline_figure
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import step_time
from moetune.solve.predict import plan_timelines
from moetune.workflows.subjects.layer import LayerSubject
from moetune.workflows.subjects.model import kinds_of

_FEWEST_OPTIONS = 2
_DEGREES = (1, 2, 4, 8, 16, 32, 64)


def layer_figures(subject: LayerSubject) -> Iterator[Figure]:
    """Yield the layer's timeline; without its profile, bars of its passes."""
    if subject.profile is None:
        yield phases_figure({"this plan": subject.plan})
        return
    forward, backward = plan_timelines(plan=subject.plan, costs=subject.costs)
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
    options = () if subject.profile is None else tuple(options_of(subject))
    if len(options) < _FEWEST_OPTIONS:
        return ()
    return (pareto_figure(options, limit_bytes=subject.memory_limit_bytes),)


def options_of(subject: LayerSubject) -> Iterator[Option]:
    """Yield the plan's choice, then every strategy with 1, 2, 4 … 64 chunks in both phases.

    In one chunk there is nothing to reuse.
    """
    plan = subject.plan
    workload, pipeline = plan.workload, plan.pipeline
    layer = layer_costs(workload=workload, costs=subject.costs)
    budget = MemoryBudget.of(workload=workload, costs=layer, limit_bytes=0)
    chosen = plan.memory.strategy, pipeline.forward_degree, pipeline.backward_degree
    most = plan.inputs.pinned.bounds.largest(workload.tokens_per_rank)
    ways = [
        (strategy, degree, degree)
        for strategy in [row.strategy for row in subject.strategies] or [plan.memory.strategy]
        for degree in _DEGREES
        if degree <= most and (degree > 1 or strategy == "none")
    ]
    for way in dict.fromkeys([chosen, *ways]):
        strategy, forward, backward = way
        try:
            step = step_time(
                costs=layer, tokens=workload.tokens_per_rank, forward_degree=forward,
                backward_degree=backward, order=pipeline.order, strategy=strategy,
            )  # fmt: skip
        except ProfileError:
            continue
        yield Option(
            name=f"strategy {strategy}, {forward} and {backward} chunks",
            group=strategy,
            step_seconds=step.seconds,
            memory_bytes=budget.peak(strategy=strategy, degrees=(forward, backward)).device_bytes,
            is_chosen=way == chosen,
        )
