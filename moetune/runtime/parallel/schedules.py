"""Torch's schedule of a layout: the order of the stages' passes, and its micro-batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
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
from moetune.domain.layout import Layout, check_micro_batches
from moetune.domain.pipeline import Schedule
from moetune.domain.training import FoldedLayout
from moetune.domain.training_rules import micro_batch_rules
from moetune.runtime.parallel.fully_sharded import Hidden

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


class _Sends(list[dist.P2POp]):
    """Sends of a batch, which come behind the receives that are added to them."""

    def __add__(self, receives: Iterable[dist.P2POp]) -> list[dist.P2POp]:  # type: ignore[override] # of list, which takes values of any type
        return [*receives, *self]


class ReceivingFirstStage(PipelineStage):
    """A stage whose sends follow the receives of their batch.

    Between passes of 1F1B torch's schedule sends and receives in one batch, `sends + receives`.
    gloo issues it in order: a rank that comes late queues its "ready" behind its own data, and its
    neighbour sends only then. With receives first both directions of a link are in use at once.
    NCCL starts a batch as one, whatever its order.
    """

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Let torch see a part of FSDP2 that keeps whole parameters until a step's end."""
        hidden = self.submod
        if isinstance(hidden, Hidden) and hidden.keeps_whole:
            self.submod = hidden.part
        try:
            yield
        finally:
            self.submod = hidden

    def backward_maybe_with_nosync(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - torch's
        """Run a backward pass."""
        with self._shown():
            return super().backward_maybe_with_nosync(*args, **options)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients behind all micro-batches."""
        with self._shown():
            super().perform_reduce_grad(grad_scale_factor)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a forward pass's activations."""
        return _Sends(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a backward pass's gradients."""
        return _Sends(super().get_bwd_send_ops(bwd_chunk_id))


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


def micro_batches_of(
    layout: Layout | FoldedLayout, wanted: int | None, *, num_sequences: int, stages_per_rank: int
) -> int:
    """Return the micro-batches of a data-parallel rank's step.

    Args:
        wanted: None for those of a folded layout, or one.

    Raises:
        InputError: they cannot run.
    """
    if not isinstance(layout, FoldedLayout):
        number = 1 if wanted is None else wanted
        check_micro_batches(
            number, num_sequences=num_sequences, pp=layout.pp, stages_per_rank=stages_per_rank
        )
        return number
    number, rest = divmod(num_sequences, layout.micro_batch)
    if rest or wanted not in (None, number):
        raise InputError(
            f"{wanted or 'no number of'} micro-batches of {layout.micro_batch} are "
            f"{num_sequences} sequences",
            f"give a multiple of {layout.micro_batch} sequences, and num_micro_batches None",
        )
    for broken in micro_batch_rules(layout, number):
        raise InputError(broken.what, broken.hint)
    return number


def forget_failed_step(schedule: TorchSchedule) -> None:
    """Drop the losses of a step that an error has ended, which torch would take for the next's."""
    schedule._internal_losses.clear()  # noqa: SLF001 - torch drops them at the end of a step alone
