"""Our layer, forward and backward, at a set degree or with a plan."""

from pathlib import Path

from benchmarks.netlab.cell import Cell, Step, module_step
from moetune import MoELayer
from moetune.domain.plan import Decision
from moetune.runtime.plans.book import read_plans


def degree_step(cell: Cell, degree: int) -> Step:
    """Return the step of our layer in `degree` chunks, forward and backward."""
    return _step(cell, pipeline=degree, plan=None)


def planned_step(cell: Cell, plan: Path) -> Step:
    """Return the step of our layer with the plan in that file."""
    (made,) = read_plans([plan])
    return _step(cell, pipeline=True, plan=plan, decision=made.decide(made.tokens_per_rank))


def _step(
    cell: Cell, *, pipeline: bool | int, plan: Path | None, decision: Decision | None = None
) -> Step:
    shape = cell.layer
    layer = MoELayer(
        d_model=shape.d_model,
        d_hidden=shape.d_hidden,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        activation=shape.activation,
        pipeline=pipeline,
        plan=plan,
    )
    layer.load_state_dict(cell.all_weights())
    if decision is not None:
        layer.pin(decision)
    return module_step(cell, layer)
