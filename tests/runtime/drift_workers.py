"""What ranks do in the tests of jobs that watch themselves: train while the wire changes."""

import logging

import torch
import torch.distributed as dist

from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans import drift
from moetune.runtime.plans.book import PlanBook
from tests.runtime.online_workers import counted_collectives
from tests.runtime.plans import small_plan
from tests.runtime.slow_link import SlowGroupLink

SHAPE = LayerShape(d_model=16, d_hidden=32, num_experts=4, top_k=1)
FAST_SECONDS, SLOW_SECONDS = 1e-3, 3e-3
CHANGE = 120


class Heard(logging.Handler):
    """Warnings of this rank's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("moetune").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def plan_of(degrees: tuple[int, int]) -> Plan:
    everywhere = ((1, 10**6, *degrees),)
    return small_plan(layer=SHAPE, tokens=32, degrees=degrees, ranges=everywhere)


def make_layer(plan: Plan, wire: SlowGroupLink, **options: object) -> MoELayer:
    book = PlanBook([plan])
    return MoELayer(16, 32, 4, 1, planbook=book, communicator=wire, **options)  # type: ignore[arg-type] # options of any kind


def step(layer: MoELayer) -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    layer(x).square().sum().backward()


def wire_gets_slower() -> None:
    """The first rank alone names the collective, once, within 50 steps; no collective is added."""
    drift.MAX_COST_SHARE = 1.0  # steps of some milliseconds are watched as rarely as long ones
    heard, wire = Heard(), SlowGroupLink(FAST_SECONDS)
    layer = make_layer(plan_of((3, 2)), wire)
    names: list[list[str]] = []
    for number in range(1, CHANGE + 51):
        if number == CHANGE:
            wire._seconds = SLOW_SECONDS
        with counted_collectives() as seen:
            step(layer)
        names.append(seen)
    assert all(one == names[-1] for one in names[-50:])
    if dist.get_rank():
        assert heard.lines == []
        return
    (line,) = heard.lines
    assert "all_to_all" in line
    since = int(line.partition("since step ")[2].partition(":")[0])
    assert CHANGE - 5 <= since <= CHANGE + 10
    assert "moetune verify" in line
