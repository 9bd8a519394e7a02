"""Jobs that watch themselves, on real ranks: what changes is named."""

import pytest
import torch
import torch.distributed as dist

from moetune.domain.layer import LayerShape
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans import monitor
from moetune.runtime.plans.book import PlanBook
from tests.ranks import run_ranks
from tests.runtime.online_workers import counted_collectives
from tests.runtime.plans import small_plan
from tests.runtime.slow_link import SlowGroupLink
from tests.runtime.workers import Heard

WIRED = LayerShape(d_model=16, d_hidden=32, num_experts=4, top_k=1)
FAST_SECONDS, SLOW_SECONDS = 4e-3, 2e-2
CHANGE = 120


def step(layer: MoELayer) -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    layer(x).square().sum().backward()


def wire_gets_slower() -> None:
    """The first rank alone names the collective, once, within 50 steps; no collective is added."""
    monitor.MAX_COST_SHARE = 1.0  # steps of some milliseconds are watched as rarely as long ones
    heard, wire = Heard(), SlowGroupLink(FAST_SECONDS)
    plan = small_plan(
        layer=WIRED, tokens=32, degrees=(2, 2), constraints={"forward-degree": "2"}
    )  # fmt: skip
    layer = MoELayer(16, 32, 4, 1, planbook=PlanBook([plan]), communicator=wire)
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
    (line,) = (line for line in heard.lines if "all_to_all" in line)
    since = int(line.partition("since step ")[2].partition(":")[0])
    assert CHANGE - 15 <= since <= CHANGE + 15  # a busy machine blurs it
    assert "moetune verify" in line


@pytest.mark.dist
def test_a_wire_that_gets_slower_in_mid_run_is_named_within_fifty_steps() -> None:
    assert run_ranks(wire_gets_slower, 2) == ["", ""]
