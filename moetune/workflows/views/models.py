"""Models as sections: the named ones, and the layouts and parts of a whole model's plan."""

from typing import TYPE_CHECKING

from moetune.domain.document import encode
from moetune.domain.layout import Layout
from moetune.domain.model import MODELS, Model
from moetune.domain.plan import Alternative, Part, Plan, TransformerPlan
from moetune.report.section import EMPTY, Cell, Figure, Section, Table, facts

if TYPE_CHECKING:  # `moetune models` needs neither, and they load numpy
    from moetune.workflows.explain import Explanation


def models_section() -> Section:
    """Return every named model with the sizes of its layer."""
    table = Table(
        name="models",
        header=("name", "layer", "d_model", "d_hidden", "experts", "top_k", "tokens", "whole"),
        rows=tuple(
            (
                Cell.words(model.name),
                Cell.words(model.title),
                *(Cell(text=str(size), value=size) for size in (model.d_model, model.d_hidden)),
                _experts(model),
                Cell(text=str(model.top_k), value=model.top_k),
                Cell.count(model.tokens_per_rank),
                _parameters(model),
            )
            for model in MODELS.values()
        ),
    )
    return Section(name="models", tables=(table,))


def model_section(model: Model, *, world_size: int) -> Section:
    """Return a model's layer on `world_size` ranks, and the sizes of the whole model."""
    sizes = [(key, str(value)) for key, value in encode(model.layer(world_size)).items()]
    layer = facts(
        "layer",
        [*sizes, ("tokens", f"{model.tokens_per_rank:,}")],
        header=("layer", f"on {world_size} ranks"),
    )
    title = f"{model.title} ({model.source})"
    if model.transformer is None:
        return Section(name="model", title=title, tables=(layer,))
    transformer = encode(model.transformer)
    del transformer["moe"]
    rows = [*((key, f"{value:,}") for key, value in transformer.items())]
    table = facts(
        "whole", [*rows, ("parameters", _parameters(model).text)], header=("whole model", "")
    )
    return Section(name="model", title=title, tables=(layer, table))


def _parameters(model: Model) -> Cell:
    """Return the parameters of a whole model: "6.8 B"."""
    if model.transformer is None:
        return EMPTY
    count = model.transformer.num_parameters
    return Cell(text=f"{count / 1e9:.1f} B", value=count)


def _experts(model: Model) -> Cell:
    if model.num_experts:
        return Cell(text=str(model.num_experts), value=model.num_experts)
    return Cell.words(f"{model.experts_per_rank} per rank")


_PARTS = (
    "On the slowest stage. one layer: forward pass of one micro-batch; forward: of all "
    "micro-batches; step: with backward passes and recomputation."
)
_ALL = Cell(text="100 %", value=1.0, unit="1")


def layouts_section(explanation: "Explanation", *, is_drawn: bool = False) -> Section:
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
        figures=_layout_figures(explanation) if is_drawn else (),
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
        figures=_part_figures(plan) if is_drawn else (),
    )


def _layout_figures(explanation: "Explanation") -> tuple[Figure, ...]:
    from moetune.workflows.views.figures import memory_figures

    return memory_figures(explanation)


def _part_figures(plan: Plan) -> tuple[Figure, ...]:
    from moetune.workflows.views.figures import parts_figures

    return tuple(parts_figures(plan))


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
