"""Buckets of a pipeline stage's parameters, in the order in which backward passes make them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

from moetune.domain.buckets import bucket_ends
from moetune.domain.layout import Layout, stage_blocks
from moetune.domain.model import Transformer
from moetune.solve.model.memory import Share, share_of
from moetune.solve.model.stages import Stage


class StageBucket(NamedTuple):
    """A bucket of a stage, and what travels before it.

    Args:
        made: share of the stage's blocks whose backward passes are before it.
        dense, experts: shares of all dense parameters, and of all experts', in earlier buckets.
    """

    made: float
    dense: float
    experts: float


def stage_buckets(
    model: Transformer, layout: Layout, *, index: int, stage: Stage, parameter_bytes: float
) -> tuple[StageBucket, ...]:
    """Return a stage's buckets, those of its last blocks first.

    Args:
        index: of the stage.
    """
    units = list(_units(model, layout, index, stage))
    num_blocks, whole = max(1, stage.num_blocks), share_of(model=model, layout=layout, stage=stage)
    found = list[StageBucket]()
    dense = experts = 0.0
    for first, own in sorted(
        _buckets(units, layout, parameter_bytes), key=itemgetter(0), reverse=True
    ):
        found.append(
            StageBucket(
                made=min(1.0, (len(units) - 1 - first) / num_blocks),
                dense=dense / max(1, whole.dense),
                experts=experts / max(1, whole.experts),
            )
        )
        dense, experts = dense + own.dense, experts + own.experts
    return tuple(found)


def _units(model: Transformer, layout: Layout, index: int, stage: Stage) -> Iterator[Share]:
    """Yield the parameters of the embedding, of each block, and of the head."""
    nothing = Stage(num_dense=0, num_moe=0, is_first=False, is_last=False)
    with_experts, dense = replace(nothing, num_moe=1), replace(nothing, num_dense=1)
    numbers = stage_blocks(model.num_layers, num_stages=layout.pp)[index]
    blocks = [with_experts if model.has_experts(number) else dense for number in numbers]
    ends = replace(nothing, is_first=stage.is_first), replace(nothing, is_last=stage.is_last)
    for one in (ends[0], *blocks, ends[1]):
        yield share_of(model=model, layout=layout, stage=one)


def _buckets(
    units: Sequence[Share], layout: Layout, parameter_bytes: float
) -> Iterator[tuple[int, Share]]:
    """Yield the number of each bucket's first unit, and its parameters.

    Parts of experts in a tensor-parallel group are in the buckets of all other parts.
    """
    nothing = Share(dense=0, experts=0)
    kinds = [units]
    if layout.expert_parallel != "tensor":
        kinds = [[replace(one, **{name: 0}) for one in units] for name in ("experts", "dense")]
    for own in kinds:
        sizes = [parameter_bytes * (one.dense + one.experts) for one in own]
        ends = bucket_ends(sizes)
        for start, end in zip((0, *ends), ends, strict=False):
            run = [number for number in range(start, end) if sizes[number]]
            bucket = own[start:end]
            yield (
                run[0],
                replace(
                    nothing,
                    dense=sum(one.dense for one in bucket),
                    experts=sum(one.experts for one in bucket),
                ),
            )
