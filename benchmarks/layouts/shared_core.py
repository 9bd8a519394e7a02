"""Pipelines of the lab, where a node's ranks share one core and compute by turns."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from moetune.domain.layout import Layout
from moetune.solve.layout.candidates import Candidate
from moetune.solve.model.stages import PipelineTime, Stage


def on_shared_core(
    candidate: Candidate, *, stages: Sequence[Stage], ranks_per_node: int
) -> Candidate:
    """Return the candidate with its pipeline's time where a node has one core for its ranks.

    Args:
        stages: of the candidate's layout.
    """
    seconds, setting = candidate.priced.seconds, candidate.setting
    pipeline = pipeline_by_turns(
        stage_seconds=[seconds.stage(stage, recompute=setting.recompute) for stage in stages],
        hop_seconds=[hop.seconds for hop in candidate.hops],
        num_micro_batches=setting.num_micro_batches,
        stages_per_core=_stages_per_core(candidate.layout, ranks_per_node),
    )
    return replace(candidate, pipeline=pipeline)


def pipeline_by_turns(
    *,
    stage_seconds: Sequence[float],
    hop_seconds: Sequence[float],
    num_micro_batches: int,
    stages_per_core: int,
) -> PipelineTime:
    """Return the time of 1F1B as `solve.model.stages.one_f_one_b`, with cores that are shared.

    Stages that compute on one core by turns, each measured while all do, are like one stage of
    their mean time: while one waits, the others are faster, and what they send each other stays.
    That is no longer than if each had a core to itself. Replicas of a stage that share a core end
    their passes together, and send together: no other computes meanwhile.

    Args:
        stage_seconds: w_i.
        hop_seconds: c_i, one fewer than stages.
        stages_per_core: consecutive ones; divides their number.
    """
    slowest = max(range(len(stage_seconds)), key=stage_seconds.__getitem__)
    each = stages_per_core
    core_seconds = [
        fmean(stage_seconds[first : first + each]) for first in range(0, len(stage_seconds), each)
    ]
    core_hops = hop_seconds[each - 1 :: each]
    period = min(_period(stage_seconds, hop_seconds), _period(core_seconds, core_hops))
    rest, send_way = num_micro_batches - 1, 2 * sum(core_hops)
    busiest = core_seconds[slowest // each]
    return PipelineTime(
        seconds=rest * period + sum(core_seconds) + send_way,
        slowest=slowest,
        busy_seconds=num_micro_batches * busiest,
        send_seconds=rest * (period - busiest) + send_way,
    )


def _stages_per_core(layout: Layout, ranks_per_node: int) -> int:
    ranks = layout.dp * layout.tp
    return 1 if ranks_per_node % ranks else math.gcd(ranks_per_node // ranks, layout.pp)


def _period(stage_seconds: Sequence[float], hop_seconds: Sequence[float]) -> float:
    hops = (0.0, *hop_seconds, 0.0)
    return max(map(sum, zip(hops, stage_seconds, hops[1:], strict=False)))
