"""Step time against memory of a draft: the options, their front, and why each one is not taken."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moetune.domain.training import FoldedLayout
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.plan_figures import Option, pareto_figure
from moetune.report.section import EMPTY, Cell, Figure, Table, percent
from moetune.solve.joint.front import LARGE, SAVING, SLOW
from moetune.solve.joint.ties import PricedLayout
from moetune.workflows.drafts import FrontDraft
from moetune.workflows.training_plan import TrainingPlan, layout_words
from moetune.workflows.views.draft_tables import SHARES, WHY, how_words, why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontView:
    """The front of a decoder's layouts as a page shows it.

    Args:
        figure: None where no other layout is near the plan.
    """

    figure: Figure | None
    table: Table


def front_view(draft: FrontDraft) -> FrontView:
    """Return what is shown of a front: its layouts with the plan, and the next ones beside them."""
    plan, best = draft.plan, draft.plan.best
    on_front = sorted(
        [best, *(one for one in draft.front if _is_beside(one, best))],
        key=lambda one: one.memory.peak_bytes,
    )
    shown = {one.layout for one in on_front}
    others = [one for one in plan.found if one.layout not in shown]
    return FrontView(
        figure=_figure(plan, [_option(one, is_chosen=one is best) for one in (*on_front, *others)]),
        table=_table(plan, on_front),
    )


def _figure(plan: TrainingPlan, options: Sequence[Option]) -> Figure | None:
    if len(options) < 2:  # noqa: PLR2004 - one point is no front
        return None
    figure = pareto_figure(options, limit_bytes=plan.limit_bytes)
    words = (
        f"The fastest layout for each memory up to {LARGE:g} × the limit and {SLOW:g} × the "
        f"plan's step, {_on_devices(plan.best.layout)}; off the line are the next layouts of other "
        f"sizes. {figure.words}"
    )
    return replace(figure, name="front", words=words)


def _on_devices(layout: FoldedLayout) -> str:
    """Return what none of the front has in host memory, as `FrontDraft` has it."""
    if layout.offload_optimizer and layout.offload_activations:
        return "some in host memory"
    if layout.offload_optimizer:
        return "no activations in host memory"
    return f"{'no optimizer' if layout.offload_activations else 'nothing'} in host memory"


def _is_beside(one: PricedLayout, best: PricedLayout) -> bool:
    """Return whether a layout is smaller than the plan, or faster: the plan may use the host's."""
    return (
        one.memory.peak_bytes < best.memory.peak_bytes or one.step.seconds < best.step.seconds
    ) and one.layout != best.layout


def _option(one: PricedLayout, *, is_chosen: bool) -> Option:
    return Option(
        name=layout_words(one.layout),
        group="with a pipeline" if one.layout.pp > 1 else "without a pipeline",
        step_seconds=one.step.seconds, memory_bytes=round(one.memory.peak_bytes),
        is_chosen=is_chosen,
    )  # fmt: skip


def _table(plan: TrainingPlan, layouts: Sequence[PricedLayout]) -> Table:
    return Table(
        name="front",
        title="The fastest layout for each memory",
        header=(
            "layout", "recompute, overlap, schedule", "memory", "step", "as against the plan", WHY,
        ),
        rows=tuple(_rows(plan, layouts)),
        notes=(f"Steps that save less than {percent(SAVING, digits=0)} are omitted.", SHARES),
    )  # fmt: skip


def _rows(plan: TrainingPlan, layouts: Sequence[PricedLayout]) -> Iterator[tuple[Cell, ...]]:
    for one in layouts:
        is_plan, slower = one is plan.best, one.step.seconds / plan.best.step.seconds - 1
        size = Cell.size(round(one.memory.peak_bytes))
        fits = one.memory.peak_bytes <= plan.limit_bytes
        yield (
            Cell.words(layout_words(one.layout), mark="chosen" if is_plan else ""),
            Cell.words(how_words(one.layout)),
            replace(size, mark="" if fits else "suspect"),
            Cell.seconds(one.step.seconds),
            EMPTY if is_plan else Cell.share(slower, sign=True),
            Cell.words("The plan." if is_plan else why_not_on_front(plan, one)),
        )


def why_not_on_front(plan: TrainingPlan, other: PricedLayout) -> str:
    """Return in a sentence why a layout of the front is not the plan."""
    over = round(other.memory.peak_bytes - plan.limit_bytes)
    if over <= 0:
        return why_not(plan, other)
    saved = plan.best.step.seconds - other.step.seconds
    return f"Needs {format_bytes(over)} more than there is, to save {format_seconds(saved)}."
