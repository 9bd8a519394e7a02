"""What the layer's arguments `pipeline`, `memory_reuse`, `plan` and `planbook` mean."""

import os
from pathlib import Path

from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.errors import InputError
from moetune.domain.layer import ExpertParallel, LayerShape
from moetune.domain.plan import Decision, Plan
from moetune.runtime.plans.book import PlanBook, read_plans


def fixed_decision(pipeline: bool | int) -> Decision | None:
    """Return the degree that the caller wants in both phases, None to leave it to the plan.

    Raises:
        InputError: the degree is below 1 or no number.
    """
    if pipeline is True:
        return None
    degree: object = pipeline or 1
    if not isinstance(degree, int) or degree < 1:
        raise InputError(f"pipeline must be True, False or a degree of at least 1, got {pipeline}")
    return Decision(forward_degree=degree, backward_degree=degree)


def forced_strategy(memory_reuse: bool | str) -> Strategy | None:
    """Return the strategy that the caller wants, None to leave it to the plan.

    Raises:
        InputError: there is no such strategy.
    """
    if memory_reuse is True:
        return None
    wanted = memory_reuse or "none"
    for strategy in STRATEGIES:
        if strategy == wanted:
            return strategy
    raise InputError(
        f"memory_reuse {memory_reuse!r} is not available",
        f"use True, False or one of {', '.join(STRATEGIES)}",
    )


def book_of(
    plan: Plan | str | os.PathLike[str] | None,
    planbook: PlanBook | None,
    layer: LayerShape,
    num_ranks: int,
    *,
    expert_parallel: ExpertParallel,
    sequence_parallel: bool,
) -> PlanBook:
    """Return the book to look plans up in.

    Raises:
        InputError: both were given, or the plan is for another layer or number of ranks, or
            for experts that are shared in another way.
    """
    if plan is None:
        return planbook if planbook is not None else PlanBook()
    if planbook is not None:
        raise InputError("give either plan or planbook, not both")
    plans = (plan,) if isinstance(plan, Plan) else read_plans([Path(plan)])
    for one in plans:
        planned = one.workload
        if (planned.layer, planned.world_size) != (layer, num_ranks):
            raise InputError(
                f"plan {one.id[:6]} is for {planned.layer} on {planned.world_size} ranks, "
                f"the layer is {layer} on {num_ranks}",
                "make a plan for this layer with `moetune plan`",
            )
        wanted = _sharing(expert_parallel, sequence_parallel=sequence_parallel)
        found = _sharing(planned.expert_parallel, sequence_parallel=planned.sequence_parallel)
        if found != wanted:
            flags = " --sequence-parallel" if sequence_parallel else ""
            raise InputError(
                f"plan {one.id[:6]} is for experts shared by {found}, "
                f"this layer shares them by {wanted}",
                f"make one with `moetune plan --expert-parallel {expert_parallel}{flags}`",
            )
    return PlanBook(plans)


def _sharing(expert_parallel: ExpertParallel, *, sequence_parallel: bool) -> str:
    return expert_parallel + (" with sequence shards" if sequence_parallel else "")
