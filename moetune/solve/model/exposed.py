"""What is exposed of a model's gradients and new parameters beside its passes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from moetune.domain.costs import Estimate
from moetune.domain.layer import PHASES, Phase
from moetune.domain.layout import Layout
from moetune.solve.hidden import Bucket, exposed_beside
from moetune.solve.model.cost_parts import CostPart
from moetune.solve.model.groups import Groups
from moetune.solve.model.prices import Priced, Prices
from moetune.solve.model.stage_buckets import StageBucket, stage_buckets
from moetune.solve.model.stages import Stage

_COMMUNICATION = frozenset(("attention all_reduce", "FFN all_reduce", "vocabulary all_reduce"))
_IN_CHUNKS = frozenset(("first all_to_all", "experts", "second all_to_all", "MoE all_reduce"))
"""Parts of the MoE layer's own timeline, which hides some of its communication."""


class LinkUse(NamedTuple):
    """Seconds of a pass while the link is idle, and while it is busy."""

    idle: float
    busy: float

    def plus(self, other: "LinkUse") -> "LinkUse":
        """Return both."""
        return LinkUse(self.idle + other.idle, self.busy + other.busy)

    def times(self, count: int) -> "LinkUse":
        """Return so many of it."""
        return LinkUse(count * self.idle, count * self.busy)


def exposed_gradients(
    prices: Prices,
    priced: Priced,
    *,
    layout: Layout,
    groups: Groups,
    zero: bool,
    recompute: bool,
    num_micro_batches: int,
) -> Estimate:
    """Return what is exposed of `Prices.gradients`, on the stage that shows most.

    They run beside the last micro-batch's backward pass, and the gathering of new parameters
    beside the first one's forward pass.

    Args:
        priced: of a micro-batch.

    Raises:
        ProfileError: no such collective was measured.
    """
    alone = prices.gradients(
        layout=layout, groups=groups, zero=zero, num_micro_batches=num_micro_batches
    )
    hidden = prices.runtime.hidden_gradients
    if hidden is not None:
        return alone._replace(seconds=alone.seconds * (1 - hidden))
    shown = 0.0
    for index, stage, share in prices.shares(layout):
        forward, backward = (link_use(priced, stage, one) for one in PHASES)
        computed = backward.idle
        if recompute:
            blocks = replace(stage, is_first=False, is_last=False)
            computed += link_use(priced, blocks, "forward").idle
        dense, experts = (
            prices.collectives_of(one, groups, zero=zero)
            for one in (replace(share, experts=0), replace(share, dense=0))
        )
        buckets = _buckets(prices, layout, index, stage)
        behind, ahead = (
            _exposed(prices, buckets, own.seconds, theirs.seconds, beside)
            for own, theirs, beside in zip(
                dense, experts, (LinkUse(computed, 0.0), forward), strict=True
            )
        )
        shown = max(shown, behind + ahead)
    return alone._replace(seconds=shown)


def _exposed(
    prices: Prices,
    buckets: Sequence[StageBucket],
    dense_seconds: float,
    expert_seconds: float,
    beside: LinkUse,
) -> float:
    return exposed_beside(
        dense_seconds + expert_seconds,
        [
            Bucket(one.made, one.dense * dense_seconds + one.experts * expert_seconds)
            for one in buckets
        ],
        computed=beside.idle,
        exchanged=beside.busy,
        speeds=prices.costs.interference.overlap_speeds,
    )


def _buckets(prices: Prices, layout: Layout, index: int, stage: Stage) -> tuple[StageBucket, ...]:
    key = ("buckets", index, layout.pp, layout.tp, layout.ep, layout.expert_parallel)
    return prices.structure.once(
        key,
        lambda: stage_buckets(
            prices.model, layout, index=index, stage=stage,
            parameter_bytes=prices.state_bytes.parameter,
        ),
    )  # fmt: skip


def link_use(priced: Priced, stage: Stage, phase: Phase) -> LinkUse:
    """Return a stage's pass by what the link does, communication that is hidden included."""
    backbone, step = priced.backbone, priced.moe.step
    experts = step.forward if phase == "forward" else step.backward
    busy = min(experts.seconds, experts.link_seconds)
    moe = _parts([one for one in priced.moe.parts if one.name not in _IN_CHUNKS], phase)
    moe = moe.plus(LinkUse(experts.seconds - busy, busy))
    use = _parts(backbone.attention, phase).times(stage.num_dense + stage.num_moe)
    use = use.plus(_parts(backbone.ffn, phase).times(stage.num_dense))
    use = use.plus(moe.times(stage.num_moe))
    use = use.plus(_parts(backbone.first, phase).times(stage.is_first))
    return use.plus(_parts(backbone.last, phase).times(stage.is_last))


def _parts(parts: Sequence[CostPart], phase: Phase) -> LinkUse:
    seconds = [0.0, 0.0]
    for one in parts:
        taken = one.forward if phase == "forward" else one.backward
        seconds[one.name in _COMMUNICATION] += taken.seconds
    return LinkUse(*seconds)
