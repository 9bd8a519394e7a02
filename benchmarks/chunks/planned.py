"""Chunks as the planner chooses them, on the lab's own profile, within a limit of memory."""

from pathlib import Path
from typing import TextIO

from benchmarks.chunks.case import DTYPE, NUM_RANKS, Case
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.profiled import profile_of
from moetune.domain.constraints import Constraints, LayoutPins, TransformerSizes
from moetune.domain.plan import Plan
from moetune.domain.request import PlanRequest
from moetune.workflows.plan import make_plan


def plan_in_lab(lab: Lab, case: Case, *, budget: str, folder: Path, echo: TextIO) -> Plan:
    """Return the plan for replicas of the whole model on all ranks, in one micro-batch.

    Args:
        budget: longest time of the profile, as `moetune profile --budget` takes it.
        folder: where the database goes.
        echo: where progress goes.

    Raises:
        MoetuneError: a rank failed, or nothing fits.
    """
    profile = profile_of(
        lab, case.transformer, tokens=case.tokens, dtype=DTYPE, budget=budget, folder=folder,
        echo=echo,
    )  # fmt: skip
    request = PlanRequest(
        layer=case.transformer.moe,
        constraints=Constraints(
            sizes=TransformerSizes.of(case.transformer),
            pins=LayoutPins(dp=NUM_RANKS, ep=1, tp=1, pp=1, micro_batch=case.sequences),
        ),
        world_size=NUM_RANKS,
        tokens_per_rank=case.tokens,
        dtype=DTYPE,
        memory_limit_bytes=case.limit_bytes,
    )
    return make_plan(request, profile=profile)
