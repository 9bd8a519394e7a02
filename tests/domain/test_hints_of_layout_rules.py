"""Hints of the layout rules: whoever follows one breaks the rule no more."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.rules import broken_rules
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.huggingface.registry import named_model

_VALUES = re.compile(
    r"(?<!·)\b(?P<name>micro_batch|global_batch|ep|etp|tp|cp|dp) (?P<values>\d+( or \d+)*)"
)
QWEN, OLMOE = (named_model(name).decoder for name in ("qwen3-30b-a3b", "olmoe"))
JOBS = [
    TrainingJob(decoder=decoder, world_size=ranks, global_batch=batch, length=length)
    for decoder, (ranks, batch, length) in itertools.product(
        (QWEN, OLMOE), ((24, 1024, 4096), (32, 96, 4095), (48, 100, 6144), (8, 4, 2048))
    )
]


def layouts(job: TrainingJob) -> Iterator[FoldedLayout]:
    """Yield layouts of all ranks, whatever rules they break."""
    for tp, cp, pp in itertools.product((1, 2, 3, 6), (1, 2, 4), (1, 2, 3)):
        dp, rest = divmod(job.world_size, tp * cp * pp)
        if not rest:
            for ep, etp, batch in itertools.product((1, 3, 5, 16), (1, 2, 5), (1, 2, 3)):
                yield FoldedLayout(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, micro_batch=batch)


def with_value(layout: FoldedLayout, name: str, value: int, ranks: int) -> FoldedLayout:
    """Return a layout with a size, and as many replicas as there are ranks."""
    changes: dict[str, Any] = {name: value}
    changed = replace(layout, **changes)
    if name == "dp":
        return replace(changed, tp=1, cp=1, pp=ranks // value)
    if changed.cp * changed.tp * changed.pp > ranks:
        changed = replace(changed, pp=1, tp=1) if name == "cp" else replace(changed, pp=1, cp=1)
    return replace(changed, dp=ranks // (changed.cp * changed.tp * changed.pp))


def followed(
    hint: str, layout: FoldedLayout, job: TrainingJob
) -> Iterator[tuple[FoldedLayout, TrainingJob]]:
    if both := re.fullmatch(r"use ep (\d+) and etp (\d+)", hint):
        yield replace(layout, ep=int(both[1]), etp=int(both[2])), job
        return
    for match in _VALUES.finditer(hint.partition(" with ")[0] if "global" in hint else hint):
        for value in map(int, match["values"].split(" or ")):
            if match["name"] == "global_batch":
                yield replace(layout, micro_batch=1), replace(job, global_batch=value)
            else:
                yield with_value(layout, match["name"], value, job.world_size), job
    if replicas := re.search(r"dp (\d+)( or (\d+))?$", hint):
        for value in filter(None, (replicas[1], replicas[3])):
            changed = with_value(replace(layout, micro_batch=1), "dp", int(value), job.world_size)
            yield changed, job


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.decoder.name}-{job.world_size}")
def test_a_followed_hint_mends_the_rule_and_is_another_layout(job: TrainingJob) -> None:
    num_followed = 0
    for layout in layouts(job):
        for rule in broken_rules(layout, job):
            kind = rule.what.partition(" (")[0]
            for changed, asked in followed(rule.hint, layout, job):
                num_followed += 1
                assert (changed, asked) != (layout, job), rule
                left = [rule.what.partition(" (")[0] for rule in broken_rules(changed, asked)]
                assert kind not in left, (rule, changed)
    assert num_followed > 100


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.decoder.name}-{job.world_size}")
def test_sizes_are_refused_where_a_remainder_is_left_and_nowhere_else(job: TrainingJob) -> None:
    decoder = job.decoder
    for layout in layouts(job):
        experts = layout.ep * layout.etp
        remainders = (
            layout.dp * layout.cp * layout.tp % experts, decoder.layer.num_experts % layout.ep,
            decoder.layer.d_hidden % layout.etp,
            job.global_batch % (layout.dp * layout.micro_batch),
            job.length % (layout.cp * layout.tp), layout.cp > 1 and job.length % (2 * layout.cp),
            *(count % layout.tp for count in decoder.head_counts),
        )  # fmt: skip
        assert any(broken_rules(layout, job)) == any(remainders), layout
