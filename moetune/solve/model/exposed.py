"""What is exposed of a model's gradients and new parameters beside its passes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from moetune.domain.costs import Estimate
from moetune.domain.layer import PHASES, Phase
from moetune.domain.layout import Layout
from moetune.solve.hidden import exposed_beside, num_buckets
from moetune.solve.model.cost_parts import CostPart
from moetune.solve.model.groups import Groups
from moetune.solve.model.memory import Share, share_of
from moetune.solve.model.prices import Priced, Prices
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
    for _, stage, share in prices.shares(layout):
        forward, backward = (computing(priced, stage, one) for one in PHASES)
        if recompute:
            blocks = replace(stage, is_first=False, is_last=False)
            backward += computing(priced, blocks, "forward")
        num_bytes = (share.dense + share.experts) * prices.state_bytes.parameter
        beside = partial(
            exposed_beside, speeds=prices.costs.interference.overlap_speeds,
            num_buckets=num_buckets(stage.num_blocks, num_bytes),
        )  # fmt: skip
        behind, ahead = prices.collectives_of(share, groups, zero=zero)
        first = _first_bucket(prices, stage, layout)
        last, wanted = prices.collectives_of(first, groups, zero=zero)
        seconds = beside(behind.seconds, first=last.seconds, computed=backward)
        seconds += beside(ahead.seconds, first=wanted.seconds, computed=forward)
        shown = max(shown, seconds)
    return alone._replace(seconds=shown)


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


def _first_bucket(prices: Prices, stage: Stage, layout: Layout) -> Share:
    """Return the parameters of a stage's first block, with the embedding if it has it."""
    with_experts = min(1, stage.num_moe)
    first = replace(stage, num_dense=1 - with_experts, num_moe=with_experts, is_last=False)
    return share_of(model=prices.model, layout=layout, stage=first)
