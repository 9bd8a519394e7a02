"""Figures of a layer's plan: its timeline, and time against memory of its options."""

from collections.abc import Iterator

from moetune.domain.costs import Costs
from moetune.fit.costs import costs_of
from moetune.report.plan_figures import Option, pareto_figure, phases_figure
from moetune.report.section import Figure
from moetune.report.timelines import timeline_figure
from moetune.solve.predict import plan_timelines
from moetune.workflows.options import layer_options
from moetune.workflows.subjects.layer import LayerSubject

_FEWEST_OPTIONS = 2


def layer_figures(subject: LayerSubject) -> Iterator[Figure]:
    """Yield the layer's timeline; without its profile, bars of its passes."""
    plan, costs = subject.plan, _costs(subject)
    if costs is None:
        yield phases_figure({"this plan": plan})
        return
    forward, backward = plan_timelines(plan=plan, costs=costs)
    yield timeline_figure(forward=forward, backward=backward, title="Timeline of one step")


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
