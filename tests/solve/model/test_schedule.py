"""Orders of passes, against the schedules of `torch.distributed.pipelining`."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from moetune.domain.pipeline import Schedule
from moetune.solve.model.schedule import most_live, orders

TORCH: dict[Schedule, Any] = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zero_bubble_v": schedules.ScheduleZBVZeroBubble,
    "dualpipe_v": schedules.ScheduleDualPipeV,
}
PASSES = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
CASES: list[tuple[Schedule, int, int, int]] = [
    *(("1f1b", pp, 1, num) for pp in (2, 3, 8) for num in (8, 17)),
    *(("interleaved", pp, vpp, num) for pp, vpp, num in ((2, 2, 4), (4, 3, 8), (3, 2, 12))),
    *(("zero_bubble", pp, vpp, num) for pp, vpp, num in ((4, 1, 4), (4, 1, 16), (3, 2, 9))),
    ("zero_bubble", 2, 4, 6),
    *(("zero_bubble_v", pp, 2, num) for pp in (2, 3, 6) for num in (2, 5, 18)),
    *(("dualpipe_v", pp, 2, num) for pp in (1, 2, 3, 6) for num in (12, 19)),
]


class RecordingStage:
    """A stage that `Schedule1F1B` can run, and that notes what it is asked for."""

    is_first = is_last = False
    has_backward = True

    def __init__(self, index: int, num_stages: int) -> None:
        self.stage_index, self.group_rank = index, index
        self.num_stages = self.group_size = num_stages
        self.passes: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, batch: int, *_: object, **__: object) -> None:
        self.passes.append(("F", self.stage_index, batch))

    def backward_one_chunk(self, batch: int, **_: object) -> None:
        self.passes.append(("B", self.stage_index, batch))

    def get_fwd_recv_ops(self, _: int) -> list[object]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _: int) -> None: ...


def torchs_1f1b(pp: int, num: int) -> list[list[tuple[str, int, int]]]:
    """Return what `Schedule1F1B` runs; the order that it shows of its last rank is another."""
    every = []
    for rank in range(pp):
        stage: Any = RecordingStage(rank, pp)
        schedule: Any = schedules.Schedule1F1B(stage, num)
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches()
        every.append(stage.passes)
    return every


def torchs_orders(
    schedule: Schedule, pp: int, vpp: int, num: int
) -> list[list[tuple[str, int, int]]]:
    if schedule == "1f1b":
        return torchs_1f1b(pp, num)
    stages = [
        SimpleNamespace(
            group_size=pp, group_rank=0, num_stages=pp * vpp, stage_index=index * pp, submod=None,
            has_backward=True, is_last=False, is_first=index == 0,
        )
        for index in range(vpp)
    ]  # fmt: skip
    order = TORCH[schedule](stages, num).pipeline_order
    every = []
    for rank in range(pp):
        actions = [part for action in order[rank] if action is not None
                   for part in action.sub_actions or (action,)]  # fmt: skip
        every.append(
            [
                (PASSES[action.computation_type.name], action.stage_index, action.microbatch_index)
                for action in actions
                if action.computation_type.name in PASSES
            ]
        )
    return every


@pytest.mark.parametrize(("schedule", "pp", "vpp", "num"), CASES)
def test_each_rank_does_what_torchs_does(schedule: Schedule, pp: int, vpp: int, num: int) -> None:
    ranks = orders(schedule, pp, vpp, num)
    assert [[tuple(step) for step in order] for order in ranks] == torchs_orders(
        schedule, pp, vpp, num
    )


@pytest.mark.parametrize(("schedule", "pp", "vpp", "num"), CASES)
def test_live_micro_batches_are_those_of_torchs_order(
    schedule: Schedule, pp: int, vpp: int, num: int
) -> None:
    for count in (num, 5 * num):
        most = []
        for order in torchs_orders(schedule, pp, vpp, count):
            kept = [0]
            for kind, _, _ in order:
                kept.append(kept[-1] + {"F": 1, "B": -1, "I": 0, "W": -1}[kind])
            most.append(max(kept) / vpp)
        assert most_live(schedule, pp, vpp, count) == tuple(most)
