"""Torch's schedule of a layout: the order of the stages' passes, and its micro-batches."""

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

from moetune.domain.errors import InputError
from moetune.domain.pipeline import Schedule
from moetune.domain.rules import micro_batch_rules
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
    layout: FoldedLayout,
    num_micro_batches: int,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> TorchSchedule:
    """Return the schedule of this rank's stages.

    Args:
        loss_of: the loss of a micro-batch, scaled.
    """
    if layout.order in _OF_SEVERAL:
        return _OF_SEVERAL[layout.order](
            [*stages], num_micro_batches, loss_fn=loss_of, scale_grads=False
        )
    # With fewer micro-batches than stages 1F1B is all forward passes, then all backward passes.
    kind = Schedule1F1B if num_micro_batches >= layout.pp else ScheduleGPipe
    return kind(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)


def micro_batches_of(layout: FoldedLayout, num_sequences: int) -> int:
    """Return the micro-batches of a data-parallel rank's step.

    Raises:
        InputError: they cannot run.
    """
    number, rest = divmod(num_sequences, layout.micro_batch)
    if rest:
        raise InputError(
            f"no number of micro-batches of {layout.micro_batch} are {num_sequences} sequences",
            f"give a multiple of {layout.micro_batch} sequences",
        )
    for broken in micro_batch_rules(layout, number):
        raise InputError(broken.what, broken.hint)
    return number


def forget_failed_step(schedule: TorchSchedule) -> None:
    """Drop the losses of a step that an error has ended, which torch would take for the next's."""
    schedule._internal_losses.clear()  # noqa: SLF001 - torch drops them at the end of a step alone
