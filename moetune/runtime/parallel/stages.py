"""Train a model whose stages, layers and batches are spread over ranks.

Once `groups` and the model's parts are made, `Stages.backward` runs each step. The schedule is
torch's (`torch.distributed.pipelining`). All-to-alls cannot deadlock in it: all ranks of an
expert-parallel group are in the same stage, and run the stage's micro-batches, forward and
backward, in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from moetune.comm.agree import raise_on_all
from moetune.comm.gloo import communicator_of
from moetune.comm.process_group import GroupRank
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.rules import micro_batch_rules
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.placement import is_dtensor
from moetune.runtime.parallel.fsdp import (
    forget_failed_passes,
    is_sharded,
    shard_fully,
    sharded_modules,
)
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.optimizer import (
    MakeOptimizer,
    MasterOptimizer,
    SummedGradients,
    clip_gradients,
)

LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The mean loss over the tokens of a micro-batch, from the last part's output and the targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shapes and dtypes of one step's batch on a data-parallel rank: (B, …), on "meta".

    Stages use these shapes to allocate receive buffers, without torch's trial run.

    Args:
        inputs: inputs of the first part.
        between: outputs of every part except the last.
        outputs: outputs of the last part.
    """

    inputs: torch.Tensor
    between: torch.Tensor
    outputs: torch.Tensor


class Stages:
    """This rank's stages of a model, which train together with all other ranks' stages.

    Move the parts to their device and dtype first.

    Args:
        parts: this rank's modules, in the order of `ranks.stages()`.
        gives_inputs: every part is also called with the first part's inputs, as `inputs`.

    Raises:
        InputError: the schedule cannot run this number of micro-batches.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        ranks: ParallelGroups,
        *,
        loss_of: LossOf,
        shapes: Shapes,
        gives_inputs: bool = False,
    ) -> None:
        num_micro_batches = micro_batches_of(ranks.layout, len(shapes.inputs))
        self.parts = nn.ModuleList(parts)
        self.ranks = ranks
        self._shape, self._gives_inputs = shapes.inputs.shape, gives_inputs
        self._batch = len(shapes.inputs)
        self._is_sharded, self._has_failed = is_sharded(ranks), False
        if self._is_sharded:
            parts = shard_fully(self.parts, ranks)
        self._parameters = [value for value in self.parts.parameters() if value.requires_grad]
        full = (value for value in self._parameters if not (self._is_sharded and is_dtensor(value)))
        self._sums = SummedGradients(self.parts, ranks, full)
        share = 1 / (num_micro_batches * ranks.layout.dp)
        stages = _pipeline_stages(parts, ranks, shapes, self._batch // num_micro_batches)
        self._is_first = any(stage.is_first for stage in stages)
        self._is_last = any(stage.is_last for stage in stages)
        self._schedule: TorchSchedule = torch_schedule(
            stages, ranks.layout, num_micro_batches,
            lambda outputs, targets: loss_of(outputs, targets) * share,
        )  # fmt: skip

    def optimizer(self, make: MakeOptimizer) -> MasterOptimizer:
        """Return an optimizer of all parameters, or of their shards if the layout has a ZeRO stage.

        Args:
            make: makes torch's optimizer for a list of parameters, such as
                `lambda parts: torch.optim.AdamW(parts, lr=1e-3)`. With ZeRO the list has this
                rank's shards, and the optimizer must work element by element.

        Raises:
            InputError: with ZeRO, the optimizer does not work element by element.
        """
        return MasterOptimizer(self._parameters, make)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that the whole model's norm is at most `max_norm`.

        All ranks call this together, between `backward` and the optimizer's step.

        Returns:
            The norm before, equal on all ranks.
        """
        stages = communicator_of(self.ranks.mesh.get_group("pp"))
        return clip_gradients(self.parts, max_norm, stages)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Run all micro-batches, and set the gradients of the global batch's mean loss.

        They equal a single process's gradients on all data-parallel ranks' sequences, for every
        kind of parameter. They replace earlier gradients, and with ZeRO only the optimizer has
        them. All ranks call this together.

        Args:
            inputs, targets: (B, …), the batch of this data-parallel rank, which is the same on all
                its stages and tensor-parallel ranks.

        Returns:
            This rank's share of the loss in float64, 0 without the last stage: see `total_loss`.

        Raises:
            InputError: the batch has another shape than the stages were made for.
            RankMismatchError: the batch of some ranks has another shape; the same on all ranks.
            MoetuneError: a layer raised it.
            CollectiveError: a rank left.
        """
        raise_on_all(communicator_of(None), self._problem(inputs, targets), "the stages' step")
        self._begin()
        losses = self._run(partial(self._schedule.step, return_outputs=False), inputs, targets)
        self._sums.over_replicas()
        self._has_failed = False
        return _share(losses, inputs)

    def _begin(self) -> None:
        """Drop the gradients of the last step, and whole gradients of a failed step."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._has_failed:
            forget_failed_passes(self.parts)
        self._has_failed = self._is_sharded

    @torch.no_grad()
    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the loss of a batch, without gradients and dropout.

        Only forward passes run, with the parts in evaluation mode; gradients stay unchanged. All
        ranks call this together, as `backward`, and with a batch of the same shape.

        Args:
            inputs, targets: as in `backward`.

        Returns:
            As in `backward`: see `total_loss`.

        Raises:
            InputError, RankMismatchError, MoetuneError, CollectiveError: as in `backward`.
        """
        raise_on_all(communicator_of(None), self._problem(inputs, targets), "the evaluation")
        training = [module for module in self.parts.modules() if module.training]
        grads = [parameter.grad for parameter in self._parameters]
        self.parts.eval()
        try:
            return _share(self._run(self._schedule.eval, inputs, targets), inputs)
        finally:
            for module in training:
                module.training = True
            for sharded in sharded_modules(self.parts):
                sharded.reshard()  # or the next step would run with these values
            for parameter, grad in zip(self._parameters, grads, strict=True):
                parameter.grad = grad  # which torch's stages of FSDP2 drop

    def _problem(self, inputs: torch.Tensor, targets: torch.Tensor) -> InputError | None:
        """Return why stages cannot run a batch: their exchanges have a fixed shape."""
        if len(inputs) != self._batch or len(targets) != self._batch:
            return InputError(
                f"{len(inputs)} sequences and {len(targets)} targets, but the stages were made for "
                f"{self._batch}",
                f"give every rank {self._batch} of a global batch of "
                f"{self._batch * self.ranks.layout.dp}",
            )
        if self.ranks.layout.pp > 1 and inputs.shape[1:] != self._shape[1:]:
            return InputError(
                f"a batch of shape {tuple(inputs.shape)}, but the pipeline's stages were made for "
                f"{tuple(self._shape)}",
                f"pad or cut the sequences to {tuple(self._shape[1:])}, or plan with their length",
            )
        return None

    def _run(
        self, passes: Callable[..., object], inputs: torch.Tensor, targets: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the micro-batches' losses; [] on ranks without the last stage.

        Args:
            passes: runs the schedule's passes, forward and backward or only forward.
        """
        losses: list[torch.Tensor] = []
        forget_failed_step(self._schedule)
        given: dict[str, Any] = {"inputs": inputs} if self._gives_inputs else {}
        try:
            passes(
                *((inputs,) if self._is_first else ()),
                target=targets if self._is_last else None,
                losses=losses,
                **given,
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
            share: result of `backward`, or the stacked results of several calls.

        Raises:
            CollectiveError: a rank left.
        """
        total = share / self.ranks.layout.tp
        communicator_of(None).all_reduce(total, "the sum of the stages' losses").wait()
        return total


def _share(losses: Sequence[torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    share = torch.zeros((), dtype=torch.float64, device=inputs.device)
    return share + sum(loss.detach() for loss in losses)


def _pipeline_stages(
    parts: Sequence[nn.Module], ranks: ParallelGroups, shapes: Shapes, micro_batch: int
) -> list[PipelineStage]:
    """Return torch's stages; given shapes avoid a trial run through the experts' all-to-alls."""
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
        for part, index in zip(parts, ranks.stages(), strict=True)
    ]


TorchSchedule = Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B


def torch_schedule(
    stages: list[PipelineStage],
    layout: FoldedLayout,
    num_micro_batches: int,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> TorchSchedule:
    """Return torch's schedule for this rank's stages.

    Args:
        loss_of: returns a micro-batch's scaled loss.
    """
    if layout.order == "interleaved":
        return ScheduleInterleaved1F1B(
            [*stages], num_micro_batches, loss_fn=loss_of, scale_grads=False
        )
    # With fewer micro-batches than stages 1F1B is all forward passes, then all backward passes.
    kind = Schedule1F1B if num_micro_batches >= layout.pp else ScheduleGPipe
    return kind(stages[0], num_micro_batches, loss_fn=loss_of, scale_grads=False)


def micro_batches_of(layout: FoldedLayout, num_sequences: int) -> int:
    """Return the number of micro-batches in a data-parallel rank's step.

    Raises:
        InputError: this number of micro-batches cannot run.
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
    """Drop a failed step's losses, which torch would take for losses of the next step."""
    schedule._internal_losses.clear()  # noqa: SLF001 - torch drops them at the end of a step alone
