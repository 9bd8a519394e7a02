"""`moetune.BatchOverlap`: two batches in flight, one of which computes while the other exchanges.

Within a layer only experts can hide an exchange. Between batches everything can: attention, dense
layers, the loss. FlowMoE and Megatron's batch-level overlap cut the model into pieces by hand;
here each batch has a thread, and `turns` says whose turn it is.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from moetune.domain.errors import InputError
from moetune.domain.training import BATCHES_IN_TURNS
from moetune.runtime.moe.turns import BatchTurn, OtherBatchError, Turns, in_turn
from moetune.runtime.parallel.replicate import batches_of

Batch = TypeVar("Batch")


class BatchOverlap(Generic[Batch]):
    """Runs the forward and backward passes of two batches, each behind the other's exchanges.

    Gradients are the sums over both batches, as of two backward passes one after the other.

    Args:
        model: with layers of experts, on CPUs, replicated by `moetune.replicate` or not at all.
        loss_of: returns a batch's loss, a scalar. It is called in two threads, one at a time, and
            all ranks must call the same layers in the same order.

    Raises:
        InputError: the model is on a GPU, or a wrapper's whose backward passes must not overlap.
    """

    def __init__(self, model: nn.Module, loss_of: Callable[[Batch], torch.Tensor]) -> None:
        _check(model)
        self._model, self._loss_of = model, loss_of
        self._follower = ThreadPoolExecutor(1, thread_name_prefix="moetune-batch")

    def __call__(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batches' losses, detached, once all gradients are there.

        Args:
            batches: two.

        Raises:
            InputError: there are more or fewer.
            Exception: whatever the loss or its backward pass raises, of the batch that failed
                first; the other one is given up.
        """
        if len(batches) != BATCHES_IN_TURNS:
            raise InputError(
                f"two batches overlap, and there are {len(batches)}",
                "give two, and the next two after them",
            )
        turns, first, second = Turns(), *batches
        with batches_of(self._model):
            run, context = partial(self._run, autocast=_autocast()), copy_context()
            following = self._follower.submit(context.run, run, BatchTurn(turns, 1), second)
            try:
                loss = run(BatchTurn(turns, 0), first)
            except OtherBatchError:
                following.result()
                raise
            except BaseException:
                following.exception()
                raise
            return loss, following.result()

    def _run(self, turn: BatchTurn, batch: Batch, *, autocast: torch.autocast) -> torch.Tensor:
        with in_turn(turn):
            with autocast:
                loss = self._loss_of(batch)
            loss.backward()
            return loss.detach()


def _autocast() -> torch.autocast:
    """Return the caller's autocast, which other threads do not have."""
    return torch.autocast(
        "cpu", dtype=torch.get_autocast_dtype("cpu"), enabled=torch.is_autocast_enabled("cpu")
    )


def _check(model: nn.Module) -> None:
    on_gpu = next((name for name, each in model.named_parameters() if each.is_cuda), None)
    if on_gpu is not None:
        raise InputError(
            f"{on_gpu} is on a GPU, where batches are not overlapped yet",
            "run one batch after the other there; chunks within a layer overlap on GPUs, too",
        )
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FSDPModule)):
            raise InputError(
                f"{type(module).__name__} takes one backward pass at a time",
                "average gradients with moetune.replicate(model) in its place",
            )
