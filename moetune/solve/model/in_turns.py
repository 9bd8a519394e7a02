"""Blocks of which two batches take turns: their timeline, and by how much it is wrong.

One batch leaves the device idle at every exchange, and what no operation of a profile has (the
host's own work, threads that move bytes) hides there. In turns nothing hides it. Profiles measure
a few such blocks as a whole, and the ratio to their timeline holds for plans in turns.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from moetune.domain.constraints import Bounds
from moetune.domain.costs import Costs
from moetune.domain.layout import Layout
from moetune.domain.model import Transformer
from moetune.domain.samples import TurnsPoint
from moetune.domain.training import BATCHES_IN_TURNS, BatchSplit
from moetune.domain.turns import TurnsRecord
from moetune.solve.layer.all_to_all import AllToAllCosts
from moetune.solve.model.costs import PositionsHalf
from moetune.solve.model.memory import share_of
from moetune.solve.model.prices import Prices
from moetune.solve.model.replicas import ReplicaStep
from moetune.solve.model.stages import Stage

Degrees = tuple[int, int]


def turns_factor(
    records: Iterable[TurnsRecord],
    *,
    model: Transformer,
    dtype: str,
    degrees: Degrees,
    split: BatchSplit = "sequences",
) -> float:
    """Return measured over predicted time of the model's blocks in turns; 1 where not measured.

    Between the numbers of chunks that were measured its logarithm is linear in theirs. By the share
    of their spread that is noise they are drawn to their mean: a plan takes the number of chunks
    that looks fastest, which would otherwise be the one whose few runs were the luckiest.

    Args:
        degrees: chunks forward and backward, of which the geometric mean counts.
    """
    found = of_model(records, model=model, dtype=dtype, split=split)
    if not found:
        return 1.0
    degrees_of = (math.log(one.point.degree) for one in found)
    known = sorted(zip(degrees_of, _drawn_together(found), strict=True))
    at = sum(map(math.log, degrees)) / 2
    if at <= known[0][0]:
        return math.exp(known[0][1])
    for (low, first), (high, last) in pairwise(known):
        if at <= high:
            return math.exp(first + (last - first) * (at - low) / (high - low))
    return math.exp(known[-1][1])


def turns_error(
    records: Iterable[TurnsRecord], *, model: Transformer, dtype: str, split: BatchSplit
) -> float:
    """Return the standard error of the logarithm of `turns_factor`; 0 where not measured."""
    found = of_model(records, model=model, dtype=dtype, split=split)
    if not found:
        return 0.0
    kept = _kept(found)
    return math.sqrt(_noise(found) * (kept + (1 - kept) / len(found)))


def _drawn_together(records: Sequence[TurnsRecord]) -> list[float]:
    """Return the residuals, drawn to their mean."""
    kept, mean = _kept(records), statistics.fmean(one.residual for one in records)
    return [mean + kept * (one.residual - mean) for one in records]


def _kept(records: Sequence[TurnsRecord]) -> float:
    """Return the share of the residuals' spread that is no noise.

    A random-effects model with its variance by moments: DerSimonian and Laird, Meta-analysis in
    clinical trials (1986), with equal weights.
    """
    spread = statistics.variance(one.residual for one in records) if len(records) > 1 else 0.0
    return max(0.0, 1 - _noise(records) / spread) if spread else 0.0


def _noise(records: Sequence[TurnsRecord]) -> float:
    return statistics.fmean(one.standard_error**2 for one in records)


def of_model(
    records: Iterable[TurnsRecord], *, model: Transformer, dtype: str, split: BatchSplit
) -> list[TurnsRecord]:
    """Return the records of the model's blocks, split so."""
    return [
        one
        for one in records
        if one.point.dtype == dtype
        and one.point.split == split
        and _has_same_blocks(one.point.model, model)
    ]


def turns_seconds(point: TurnsPoint, *, costs: Costs, per_node: int) -> float:
    """Return the predicted time of the blocks, with the sums of both batches' gradients.

    Args:
        per_node: devices of a node.

    Raises:
        ProfileError: an operation was not measured.
    """
    load, size = point.workload, point.world_size
    layout = Layout(expert_parallel="all_to_all", dp=size, ep=size, tp=1, pp=1)
    prices = Prices(
        model=point.model, dtype=point.dtype, costs=costs, bounds=Bounds(max_degree=1),
        per_node=per_node,
    )  # fmt: skip
    groups = prices.groups(layout)
    halves: tuple[PositionsHalf | None, ...] = (
        (None,) if point.split == "sequences" else ("first", "last")
    )
    priced = [
        prices.priced(
            layout=layout, groups=groups, sequences=point.sequences, one_chunk=True, half=half
        )
        for half in halves
    ]
    step = ReplicaStep(
        model=point.model, dtype=point.dtype, costs=costs, priced=priced[0],
        last=priced[1] if len(priced) > 1 else None,
        layer=AllToAllCosts(
            layer=load.layer, world_size=load.world_size, dtype=load.dtype, costs=costs,
            num_nodes=groups.experts.num_nodes,
        ),
        groups=groups, tokens=load.tokens_per_rank,
    )  # fmt: skip
    degrees = point.degree, point.degree
    played = step.blocks_seconds(degrees, in_flight=BATCHES_IN_TURNS)
    return played + _sums_seconds(point, layout, costs)


def _sums_seconds(point: TurnsPoint, layout: Layout, costs: Costs) -> float:
    """Return the time to add the second batch's gradients to the first one's; 0 if unknown."""
    model = point.model
    stage = Stage(
        num_dense=model.num_layers - model.num_moe_layers, num_moe=model.num_moe_layers,
        is_first=False, is_last=False,
    )  # fmt: skip
    share = share_of(model=model, layout=layout, stage=stage)
    found = costs.rows_op(
        op="accumulate", dtype=point.dtype, rows=share.dense + share.experts, width=1
    )
    return 0.0 if found is None else found.seconds


def _has_same_blocks(few: Transformer, model: Transformer) -> bool:
    return replace(few, num_layers=model.num_layers, vocab_size=model.vocab_size) == model
