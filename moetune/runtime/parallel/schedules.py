"""Torch's schedule of a layout: the order of the stages' passes."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from moetune.domain.layout import Layout
from moetune.domain.pipeline import Schedule
from moetune.domain.training import FoldedLayout

_OfSeveral = (
    ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble | ScheduleZBVZeroBubble
    | ScheduleDualPipeV
)  # fmt: skip
TorchSchedule = Schedule1F1B | ScheduleGPipe | _OfSeveral
_OF_SEVERAL: Mapping[Schedule, type[_OfSeveral]] = MappingProxyType({
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
})  # fmt: skip


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
    order: Schedule = "interleaved" if len(stages) > 1 else "1f1b"
    if isinstance(layout, FoldedLayout):
        order = layout.order
    if order in _OF_SEVERAL:
        return _OF_SEVERAL[order]([*stages], num_micro_batches, loss_fn=loss_of, scale_grads=False)
    # With fewer micro-batches than stages 1F1B is all forward passes, then all backward passes.
    kind = Schedule1F1B if num_micro_batches >= layout.pp else ScheduleGPipe
    return kind(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)


def forget_failed_step(schedule: TorchSchedule) -> None:
    """Drop the losses of a step that an error has ended, which torch would take for the next's."""
    schedule._internal_losses.clear()  # noqa: SLF001 - torch drops them at the end of a step alone
