"""Figures of a layer's plan: its timeline, and time against memory of its options."""

from collections.abc import Iterator

from moetune.domain.costs import Costs
from moetune.fit.costs import costs_of
from moetune.report.plan_figures import Option, pareto_figure, phases_figure
from moetune.report.section import Figure
from moetune.report.timelines import timeline_figure
from moetune.solve.predict import plan_timelines
from moetune.workflows.explain import Explanation
from moetune.workflows.options import layer_options

_FEWEST_OPTIONS = 2


def layer_figures(explanation: Explanation) -> Iterator[Figure]:
    """Yield the layer's timeline; without its profile, bars of its passes."""
    plan, costs = explanation.plan, _costs(explanation)
    if costs is None:
        yield phases_figure({"this plan": plan})
        return
    forward, backward = plan_timelines(plan=plan, costs=costs)
    yield timeline_figure(forward=forward, backward=backward, title="Timeline of one step")


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
