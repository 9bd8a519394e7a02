"""Figures of a plan: parts of its step, its timeline, and time against memory of its options."""

from collections.abc import Iterator

from moetune.domain.costs import Costs
from moetune.domain.layout import Layout
from moetune.domain.plan import Plan
from moetune.fit.costs import costs_of
from moetune.report.plan_figures import (
    Option,
    pareto_figure,
    parts_figure,
    phases_figure,
)
from moetune.report.section import Figure
from moetune.report.timelines import stages_figure, timeline_figure
from moetune.solve.layout.words import name_layout
from moetune.solve.model.groups import groups_of
from moetune.solve.predict import plan_timelines
from moetune.workflows.explain import Explanation
from moetune.workflows.options import layer_options

_FEWEST_OPTIONS = 2


def parts_figures(plan: Plan) -> Iterator[Figure]:
    """Yield the parts of a whole model's step, and its pipeline where it has stages."""
    transformer = plan.transformer
    if transformer is None:
        return
    yield parts_figure(transformer)
    if len(transformer.stages) > 1:
        yield stages_figure(transformer.stages, num_micro_batches=transformer.num_micro_batches)


def layer_figures(explanation: Explanation) -> Iterator[Figure]:
    """Yield the layer's timeline; without its profile, bars of its passes."""
    plan, transformer, costs = explanation.plan, explanation.plan.transformer, _costs(explanation)
    if explanation.profile is None or costs is None:
        if transformer is None:
            yield phases_figure({"this plan": plan})
        return
    if transformer is not None and not transformer.moe_every:
        return
    per_node = explanation.profile.machine.devices_per_node
    num_nodes = (
        0 if transformer is None else groups_of(plan.layout, per_node=per_node).experts.num_nodes
    )
    forward, backward = plan_timelines(plan=plan, costs=costs, num_nodes=num_nodes)
    title = "Timeline of one step" if transformer is None else "One MoE layer with one micro-batch"
    yield timeline_figure(forward=forward, backward=backward, title=title)


def memory_figures(explanation: Explanation) -> tuple[Figure, ...]:
    """Return time against memory, where there are at least two options."""
    options = options_of(explanation)
    if len(options) < _FEWEST_OPTIONS:
        return ()
    return (pareto_figure(options, limit_bytes=explanation.memory_limit_bytes),)


def options_of(explanation: Explanation) -> tuple[Option, ...]:
    """Return the plan and its alternatives, each with its step time and memory.

    Of a whole model these are the layouts in the plan; of a layer, every strategy of the
    explanation with 1, 2, 4 … 64 chunks in both phases.
    """
    plan = explanation.plan
    if plan.transformer is not None:
        return tuple(_layouts(plan))
    costs = _costs(explanation)
    if costs is None:
        return ()
    return layer_options(explanation, costs)


def _costs(explanation: Explanation) -> Costs | None:
    if explanation.profile is None:
        return None
    allowed = explanation.plan.inputs.pinned.allow_modelled
    return costs_of(explanation.profile, allow_modelled=allowed)


def _layouts(plan: Plan) -> Iterator[Option]:
    assert plan.transformer is not None  # noqa: S101 - the caller has looked

    def option(layout: Layout, seconds: float, num_bytes: int, *, is_chosen: bool) -> Option:
        return Option(
            name=name_layout(layout),
            group="stages" if layout.pp > 1 else "no stages",
            step_seconds=seconds,
            memory_bytes=num_bytes,
            is_chosen=is_chosen,
        )

    transformer = plan.transformer
    yield option(
        plan.layout, transformer.step_seconds, transformer.memory.total_bytes, is_chosen=True
    )
    for one in plan.alternatives:
        if one.layout is not None and one.memory_bytes is not None:
            yield option(one.layout, one.step_seconds, one.memory_bytes, is_chosen=False)
