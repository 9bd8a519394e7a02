"""What ranks do in the tests of jobs that watch themselves: train while the wire changes."""

import logging

import torch
import torch.distributed as dist

from moetune.domain.layer import LayerShape
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans import drift
from moetune.runtime.plans.book import PlanBook
from moetune.runtime.plans.trial import BLOCK_CALLS, NUM_BLOCKS, WARM_UP_CALLS
from tests.runtime.faults import make
from tests.runtime.online_workers import (
    MadeUpClock,
    Times,
    counted_collectives,
    plan_of,
    train,
)
from tests.runtime.plans import small_plan
from tests.runtime.slow_link import SlowGroupLink
from tests.runtime.workers import relative_error

SHAPE = LayerShape(d_model=16, d_hidden=32, num_experts=4, top_k=1)
FAST_SECONDS, SLOW_SECONDS = 4e-3, 2e-2
CHANGE = 120
NUM_TRIED = WARM_UP_CALLS + NUM_BLOCKS * BLOCK_CALLS
PLAN = plan_of(2)


class Heard(logging.Handler):
    """Warnings of this rank's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("moetune").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def step(layer: MoELayer) -> None:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    layer(x).square().sum().backward()


def wire_gets_slower() -> None:
    """The first rank alone names the collective, once, within 50 steps; no collective is added."""
    drift.MAX_COST_SHARE = 1.0  # steps of some milliseconds are watched as rarely as long ones
    heard, wire = Heard(), SlowGroupLink(FAST_SECONDS)
    plan = small_plan(
        layer=SHAPE, tokens=32, degrees=(2, 1), constraints={"forward-degree": "2"}
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


def one_chunk_is_tried(times: Times, survivor: tuple[int, int]) -> None:
    """One chunk is among the first steps, on all ranks at once; the faster decision stays."""
    heard, clock = Heard(), MadeUpClock(times)
    layer = make(pipeline=True, planbook=PlanBook([PLAN], clock=clock), dtype=torch.float64)
    clock.layer = layer
    reference = make(pipeline=False, dtype=torch.float64)
    decisions: list[tuple[int, int]] = []
    names: list[list[str]] = []
    for _ in range(NUM_TRIED + 10):
        with counted_collectives() as seen:
            y = train(layer, 40)
        names.append(seen)
        decisions.append((layer.decision.forward_degree, layer.decision.backward_degree))
        assert relative_error(y, train(reference, 40)) <= 1e-12
    _check_course(decisions, survivor)
    pinned = make(pipeline=True, dtype=torch.float64)
    pinned.pin(layer.decision)
    train(pinned, 40)  # the ranks' first meeting has an exchange of its own
    with counted_collectives() as plain:
        train(pinned, 40)
    # The first step of another decision exchanges its counts once more.
    assert all(one == plain for one in names[-9:])
    expected = 1 if survivor == (1, 1) and not dist.get_rank() else 0
    assert sum("loses to one chunk" in line for line in heard.lines) == expected
    before = clock.num_stamps
    train(layer, 40)
    assert clock.num_stamps == before


def _check_course(decisions: list[tuple[int, int]], survivor: tuple[int, int]) -> None:
    everywhere: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, decisions)
    assert all(one == decisions for one in everywhere)
    planned = (PLAN.pipeline.forward_degree, PLAN.pipeline.backward_degree)
    assert decisions[:WARM_UP_CALLS] == [planned] * WARM_UP_CALLS
    assert decisions.count((1, 1)) >= NUM_BLOCKS // 2 * BLOCK_CALLS
    assert set(decisions[:NUM_TRIED]) == {planned, (1, 1)}
    assert decisions[-10:] == [survivor] * 10


def chunks_pay(_: str, degree: int) -> float:
    """Return times of a wire that chunks hide."""
    return 1.0 / degree


def chunks_cost(_: str, degree: int) -> float:
    """Return times of a machine where every chunk costs."""
    return 1.0 + 0.1 * degree


def chunks_make_no_difference(_: str, __: int) -> float:
    """Return times of a machine that is busy with something else."""
    return 1.0
