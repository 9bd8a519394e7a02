"""Layouts and parts of a whole model's plan as sections."""

from moetune.domain.layout import Layout
from moetune.domain.model_plan import Part, TransformerPlan
from moetune.domain.plan import Alternative, Plan
from moetune.report.section import EMPTY, Cell, Section, Table
from moetune.workflows.explain import Explanation
from moetune.workflows.views.figures import memory_figures, parts_figures

_PARTS = (
    "On the slowest stage. one layer: forward pass of one micro-batch; forward: of all "
    "micro-batches; step: with backward passes and recomputation."
)
_ALL = Cell(text="100 %", value=1.0, unit="1")


def layouts_section(explanation: Explanation, *, is_drawn: bool = False) -> Section:
    """Return the chosen layout and those that lost, with their times, bytes and reasons.

    Args:
        is_drawn: add figures, for a page.
    """
    plan = explanation.plan
    transformer = _whole(plan)
    chosen = (
        *_sizes(plan.layout),
        Cell.seconds(transformer.step_seconds),
        EMPTY,
        _speed(plan, transformer.step_seconds),
        Cell.size(transformer.memory.total_bytes),
        Cell.words("chosen"),
    )
    lost = [_lost(one, plan) for one in plan.alternatives if one.layout is not None]
    return Section(
        name="layouts",
        title="Layouts",
        tables=(
            Table(
                name="layouts",
                header=(
                    "dp", "ep", "tp", "pp", "experts", "step", "slower by", "tokens/s", "memory",
                    "because",
                ),
                rows=(chosen, *lost),
                wide=("slower by",),
            ),
        ),
        figures=memory_figures(explanation) if is_drawn else (),
    )  # fmt: skip


def parts_section(plan: Plan, *, is_drawn: bool = False) -> Section:
    """Return the parts of the step on the slowest stage, of the forward pass and in total."""
    transformer = _whole(plan)
    forward = sum(part.forward_seconds for part in transformer.parts)
    every = (
        Cell.words("all"), EMPTY, Cell.seconds(forward), _ALL,
        Cell.seconds(transformer.step_seconds), _ALL,
    )  # fmt: skip
    return Section(
        name="parts",
        title="Parts of the model's step",
        tables=(
            Table(
                name="parts",
                header=("part", "one layer", "forward", "share", "step", "share"),
                rows=(*(_part(part, forward) for part in transformer.parts), every),
                notes=(_PARTS,),
            ),
        ),
        figures=tuple(parts_figures(plan)) if is_drawn else (),
    )


def _whole(plan: Plan) -> TransformerPlan:
    assert plan.transformer is not None  # noqa: S101 - the caller has looked
    return plan.transformer


def _part(part: Part, forward: float) -> tuple[Cell, ...]:
    passes = (EMPTY, EMPTY, EMPTY)
    if part.forward_seconds:
        passes = (
            Cell.seconds(part.layer_seconds),
            Cell.seconds(part.forward_seconds),
            Cell.share(part.forward_seconds / forward),
        )
    return Cell.words(part.name), *passes, Cell.seconds(part.seconds), Cell.share(part.share)


def _lost(one: Alternative, plan: Plan) -> tuple[Cell, ...]:
    assert one.layout is not None  # noqa: S101 - the caller has looked
    return (
        *_sizes(one.layout),
        Cell.seconds(one.step_seconds),
        Cell.share(one.step_seconds / _whole(plan).step_seconds - 1, sign=True),
        _speed(plan, one.step_seconds),
        Cell.size(one.memory_bytes),
        Cell.words(one.lost_because),
    )


def _sizes(layout: Layout) -> tuple[Cell, ...]:
    sizes = (layout.dp, layout.ep, layout.tp, layout.pp)
    return *map(Cell.count, sizes), Cell.words(layout.expert_parallel)


def _speed(plan: Plan, seconds: float) -> Cell:
    speed = plan.inputs.tokens_per_rank / seconds
    return Cell(text=f"{speed:,.0f}", value=speed)
