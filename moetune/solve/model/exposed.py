"""What is exposed of a model's gradients and new parameters beside its passes."""

from collections.abc import Sequence
from dataclasses import replace

from moetune.domain.costs import Estimate
from moetune.domain.layer import PHASES, Phase
from moetune.domain.layout import Layout
from moetune.solve.hidden import Bucket, exposed_beside
from moetune.solve.model.cost_parts import CostPart
from moetune.solve.model.groups import Groups
from moetune.solve.model.prices import Priced, Prices
from moetune.solve.model.stage_buckets import StageBucket, stage_buckets
from moetune.solve.model.stages import Stage

_COMMUNICATION = frozenset(
    (
        "first all_to_all", "second all_to_all", "MoE all_reduce", "attention all_reduce",
        "FFN all_reduce", "vocabulary all_reduce",
    )
)  # fmt: skip


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
        forward, backward = (computing(priced, stage, one) for one in PHASES)
        if recompute:
            blocks = replace(stage, is_first=False, is_last=False)
            backward += computing(priced, blocks, "forward")
        dense, experts = (
            prices.collectives_of(one, groups, zero=zero)
            for one in (replace(share, experts=0), replace(share, dense=0))
        )
        buckets = _buckets(prices, layout, index, stage)
        seconds = sum(
            _exposed(prices, buckets, own.seconds, theirs.seconds, computed)
            for own, theirs, computed in zip(dense, experts, (backward, forward), strict=True)
        )
        shown = max(shown, seconds)
    return alone._replace(seconds=shown)


def _exposed(
    prices: Prices,
    buckets: Sequence[StageBucket],
    dense_seconds: float,
    expert_seconds: float,
    computed: float,
) -> float:
    return exposed_beside(
        dense_seconds + expert_seconds,
        [
            Bucket(one.made, one.dense * dense_seconds + one.experts * expert_seconds)
            for one in buckets
        ],
        computed=computed,
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


def computing(priced: Priced, stage: Stage, phase: Phase) -> float:
    """Return the seconds of a stage's pass without any communication, hidden or not."""
    backbone, step = priced.backbone, priced.moe.step
    experts = step.forward if phase == "forward" else step.backward
    others = [one for one in priced.moe.parts if one.name != "experts"]
    moe = _computed(others, phase) + max(0.0, experts.seconds - experts.link_seconds)
    seconds = (stage.num_dense + stage.num_moe) * _computed(backbone.attention, phase)
    seconds += stage.num_dense * _computed(backbone.ffn, phase) + stage.num_moe * moe
    seconds += stage.is_first * _computed(backbone.first, phase)
    return seconds + stage.is_last * _computed(backbone.last, phase)


def _computed(parts: Sequence[CostPart], phase: Phase) -> float:
    return sum(
        (one.forward if phase == "forward" else one.backward).seconds
        for one in parts
        if one.name not in _COMMUNICATION
    )
