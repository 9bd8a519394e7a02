"""Torch's schedule of a layout: the order of the stages' passes."""

from collections.abc import Callable

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from moetune.domain.layout import Layout
from moetune.domain.training import FoldedLayout

TorchSchedule = Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B


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
    several = len(stages) > 1
    if isinstance(layout, FoldedLayout):
        several = layout.order == "interleaved"
    if several:
        return ScheduleInterleaved1F1B(
            [*stages], num_micro_batches, loss_fn=loss_of, scale_grads=False
        )
    # With fewer micro-batches than stages 1F1B is all forward passes, then all backward passes.
    kind = Schedule1F1B if num_micro_batches >= layout.pp else ScheduleGPipe
    return kind(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)
