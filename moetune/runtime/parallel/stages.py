"""Train a model whose stages, layers and batches are spread over ranks.

Once `groups` and the model's parts are made, `Stages.backward` runs each step. The schedule is
torch's (`torch.distributed.pipelining`). Exchanges between experts cannot deadlock in it: all ranks
of an expert group are in the same stage, and a stage runs its micro-batches, forward and backward,
in the same order on all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from moetune.comm.gloo import communicator_of
from moetune.comm.transfer import GroupRank
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.layout import check_micro_batches
from moetune.runtime.moe.all_to_all import AllToAllLayer
from moetune.runtime.parallel.gradients import GradientBuffer, gradient_buffers
from moetune.runtime.parallel.groups import ParallelGroups

LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The mean loss over the tokens of a micro-batch, from the last part's output and the targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shapes and dtypes of one step's batch on a data-parallel rank: (B, …), on "meta".

    Stages allocate the tensors that they receive from them, without torch's trial run.

    Args:
        inputs: of the first part.
        between: of every part's output but the last one's.
        outputs: of the last part.
    """

    inputs: torch.Tensor
    between: torch.Tensor
    outputs: torch.Tensor


class Stages:
    """This rank's stages of a model, which train together with those of all other ranks.

    Move the parts to their device and dtype first.

    Args:
        parts: this rank's modules, one for each of `ranks.stages(len(parts))`. Several of them
            are interleaved.
        num_micro_batches: of a data-parallel rank's batch.

    Raises:
        InputError: the schedule does not take so many micro-batches.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        ranks: ParallelGroups,
        *,
        loss_of: LossOf,
        shapes: Shapes,
        num_micro_batches: int,
    ) -> None:
        check_micro_batches(
            num_micro_batches,
            num_sequences=len(shapes.inputs),
            pp=ranks.layout.pp,
            stages_per_rank=len(parts),
        )
        self.parts = nn.ModuleList(parts)
        self.ranks = ranks
        self._batch = len(shapes.inputs)
        self._buffers = _gradient_buffers(self.parts, ranks)
        share = 1 / (num_micro_batches * ranks.layout.dp)
        stages = _pipeline_stages(parts, ranks, shapes, self._batch // num_micro_batches)
        self._is_first, self._is_last = stages[0].is_first, stages[-1].is_last
        self._schedule = _schedule(
            stages, num_micro_batches, lambda outputs, targets: loss_of(outputs, targets) * share
        )

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run all micro-batches, and set gradients to those of the global batch's mean loss.

        They equal one process's gradients on all data-parallel ranks' sequences, for every kind of
        parameter, and replace earlier ones. All ranks call this together.

        Args:
            inputs, targets: (B, …), the batch of this data-parallel rank: the same on all its
                stages and tensor-parallel ranks.

        Returns:
            This rank's share of the loss in float64, 0 without the last stage: see `total_loss`.

        Raises:
            InputError: the batch has another size than the shapes.
            MoetuneError: a layer raised it.
            CollectiveError: a rank left.
        """
        if len(inputs) != self._batch:
            raise InputError(f"{len(inputs)} sequences, but the stages were made for {self._batch}")
        self.parts.zero_grad()
        for buffer in self._buffers:
            buffer.begin()
        losses = self._run(inputs, targets)
        for transfer in [buffer.all_reduce() for buffer in self._buffers]:
            transfer.wait()
        share = torch.zeros((), dtype=torch.float64, device=inputs.device)
        return share + sum(loss.detach() for loss in losses)

    def _run(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        try:
            self._schedule.step(
                *((inputs,) if self._is_first else ()),
                target=targets if self._is_last else None,
                losses=losses,
                return_outputs=False,
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, MoetuneError):  # torch wraps errors of a stage
                raise error.__cause__ from None
            if error.__cause__ is not None:
                raise
            world = GroupRank(dist.get_rank(), tuple(range(dist.get_world_size())))
            name = "the exchange between pipeline stages"
            raise world.error("send_receive", name, (), error) from error
        return losses

    def total_loss(self, share: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the global batch; all ranks call this together.

        Args:
            share: of `backward`, or of several calls, stacked.

        Raises:
            CollectiveError: a rank left.
        """
        total = share / self.ranks.layout.tp
        communicator_of(None).all_reduce(total, "the sum of the stages' losses").wait()
        return total


def _pipeline_stages(
    parts: Sequence[nn.Module], ranks: ParallelGroups, shapes: Shapes, micro_batch: int
) -> list[PipelineStage]:
    """Return torch's stages; given shapes avoid a trial run through the experts' exchanges."""
    num_stages = ranks.layout.pp * len(parts)
    inputs, outputs = shapes.inputs[:micro_batch], shapes.outputs[:micro_batch]
    between = shapes.between[:micro_batch].requires_grad_()
    return [
        PipelineStage(
            part,
            index,
            num_stages,
            torch.device(ranks.mesh.device_type),
            input_args=inputs if index == 0 else between,
            output_args=outputs if index == num_stages - 1 else between,
            group=ranks.mesh.get_group("pp"),
        )
        for part, index in zip(parts, ranks.stages(len(parts)), strict=True)
    ]


def _schedule(
    stages: list[PipelineStage], num_micro_batches: int, loss_of: LossOf
) -> Schedule1F1B | ScheduleInterleaved1F1B:
    if len(stages) == 1:
        return Schedule1F1B(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)
    return ScheduleInterleaved1F1B([*stages], num_micro_batches, loss_fn=loss_of, scale_grads=False)


def _gradient_buffers(parts: nn.ModuleList, ranks: ParallelGroups) -> list[GradientBuffer]:
    """Return buffers to sum over "dp", and over the replicas of this rank's experts.

    Experts behind an all-to-all have gradients from their whole group's tokens already. No gradient
    is summed over "tp": it is equal there, or of a part of a layer that one rank has.
    """
    experts = [
        parameter
        for module in parts.modules()
        if isinstance(module, AllToAllLayer)
        for parameter in module.experts.parameters()
    ]
    mine = {id(parameter) for parameter in experts}
    others = [parameter for parameter in parts.parameters() if id(parameter) not in mine]
    return [
        *gradient_buffers(others, ranks.mesh.get_group("dp")),
        *gradient_buffers(experts, ranks.replicas),
    ]
