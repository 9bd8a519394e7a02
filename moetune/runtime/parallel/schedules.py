"""Torch's schedule of a layout: the order of the stages' passes."""

from collections.abc import Callable

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    ScheduleDualPipeV,
)

from moetune.domain.layout import Layout
from moetune.domain.training import FoldedLayout

TorchSchedule = PipelineScheduleSingle | PipelineScheduleMulti
_SEVERAL = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}


def torch_schedule(
    stages: list[PipelineStage],
    layout: Layout | FoldedLayout,
    num_micro_batches: int,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> TorchSchedule:
    """Return the schedule of this rank's stages.

    Args:
        loss_of: the loss of a micro-batch, scaled.
    """
    order = "interleaved" if len(stages) > 1 else "1f1b"
    if isinstance(layout, FoldedLayout):
        order = layout.order
    if order != "1f1b":
        return _SEVERAL[order]([*stages], num_micro_batches, loss_fn=loss_of, scale_grads=False)
    # With fewer micro-batches than stages 1F1B is all forward passes, then all backward passes.
    kind = Schedule1F1B if num_micro_batches >= layout.pp else ScheduleGPipe
    return kind(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)
