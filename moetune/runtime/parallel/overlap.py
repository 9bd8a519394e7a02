"""`moetune.BatchOverlap`: two batches in flight, one of which computes while the other exchanges.

Within a layer only experts can hide an exchange. Between batches everything can: attention, dense
layers, the loss. FlowMoE and Megatron's batch-level overlap cut the model into pieces by hand;
here each batch has a thread, and `turns` says whose turn it is.

On a GPU both threads issue to the caller's stream, one at a time, so that kernels run in the order
of the turns. Exchanges have the streams of their communicators, as without turns.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from moetune.domain.errors import InputError
from moetune.domain.training import BATCHES_IN_TURNS
from moetune.runtime.moe.draws import Draws, generators_of
from moetune.runtime.moe.turns import BatchTurn, OtherBatchError, Turns, in_turn
from moetune.runtime.parallel.replicate import batches_of
from moetune.runtime.parallel.thread_state import ThreadState

Batch = TypeVar("Batch")


class BatchOverlap(Generic[Batch]):
    """Runs the forward and backward passes of two batches, each behind the other's exchanges.

    Gradients are the sums over both batches, as of two backward passes one after the other.

    Args:
        model: with layers of experts, replicated by `moetune.replicate` or not at all.
        loss_of: returns a batch's loss, a scalar. It is called in two threads, one at a time, and
            all ranks must call the same layers in the same order.

    Raises:
        InputError: the model has a wrapper whose backward passes must not overlap.
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
        first, second = batches
        devices = _devices(self._model)
        state, generators = ThreadState.of_this_thread(devices), generators_of(devices)
        turns = Turns(waits_on_host=state.gpu is None)
        leads = BatchTurn(turns, 0, Draws.going_on(generators))
        follows = BatchTurn(turns, 1, Draws.beside(generators))
        with batches_of(self._model), leads.draws.left():
            following = self._follower.submit(copy_context().run, self._run, follows, second, state)
            try:
                loss = self._run(leads, first, state)
            except OtherBatchError:
                following.result()
                raise
            except BaseException:
                following.exception()
                raise
            return loss, following.result()

    def _run(self, turn: BatchTurn, batch: Batch, state: ThreadState) -> torch.Tensor:
        with in_turn(turn), state.on_streams(), _backward_in_this_thread():
            with state.autocast(is_on=True):
                loss = self._loss_of(batch)
            with state.autocast(is_on=False):
                loss.backward()
            return loss.detach()


def _devices(model: nn.Module) -> set[torch.device]:
    return {each.device for each in (*model.parameters(), *model.buffers())}


def _backward_in_this_thread() -> AbstractContextManager[None]:
    """Let a GPU's backward passes run where they are asked for, as a CPU's do.

    Torch has one thread for all backward passes of a GPU: a batch that waits there for its turn
    would stop the other one, whose turn it is.
    """
    return torch.autograd.set_multithreading_enabled(mode=False)


def _check(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FSDPModule)):
            raise InputError(
                f"{type(module).__name__} takes one backward pass at a time",
                "average gradients with moetune.replicate(model) in its place",
            )
