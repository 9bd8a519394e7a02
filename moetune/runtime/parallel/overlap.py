"""`moetune.BatchOverlap`: two batches in flight, one of which computes while the other exchanges.

An online plan book may find that they are faster one after the other, and then they run so.

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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from moetune.domain.errors import InputError
from moetune.domain.training import BATCH_SPLITS, BATCHES_IN_TURNS, BatchSplit, StepOverlap
from moetune.runtime.moe.draws import Draws, generators_of
from moetune.runtime.moe.gate import Gate
from moetune.runtime.moe.halves import Halves
from moetune.runtime.moe.turns import BatchTurn, OtherBatchError, Turns, in_turn
from moetune.runtime.parallel.half_keys import begin_backward_of_half
from moetune.runtime.parallel.own_layers import named_layers
from moetune.runtime.parallel.replicate import batches_of, unreduced
from moetune.runtime.parallel.thread_state import ThreadState
from moetune.runtime.plans.overlap_search import OverlapSearch

Batch = TypeVar("Batch")


class BatchOverlap(Generic[Batch]):
    """Runs the forward and backward passes of two batches, each behind the other's exchanges.

    Gradients are the sums over both batches, as of two backward passes one after the other.

    Layers with an online plan book have other ways measured in the first steps: turns without
    chunks, and chunks without turns, one batch after the other. The fastest stays.

    Halves of one batch (`split`) give the numbers of the whole batch, as FlowMoE's micro-batches
    do: attention and gate of one half run behind the exchange of the other. Balance losses are
    those of all its tokens. Halves always take turns: no search decides otherwise.

    Args:
        model: with layers of experts, replicated by `moetune.replicate` or not at all.
        loss_of: returns a batch's loss, a scalar; of half a batch its part, so that both add up to
            the loss of the whole. It is called in two threads, one at a time, and all ranks must
            call the same layers in the same order.
        split: the two are halves of one batch: of its "sequences", or the first and the last
            "positions" of each, for which attention must be causal and take the keys and values of
            the first ones (`with_first_half`). None: they are two batches.

    Raises:
        InputError: the model has a wrapper whose backward passes must not overlap, or a layer whose
            numbers would be those of half a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_of: Callable[[Batch], torch.Tensor],
        *,
        split: BatchSplit | None = None,
    ) -> None:
        _check(model)
        if split is not None:
            _check_halves(model, split)
        self._model, self._loss_of, self._split = model, loss_of, split
        self._search = None if split else _search_of(model)
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
        devices = _devices(self._model)
        search = self._search
        if search is None or search.is_settled:
            return self._run(batches, "both" if search is None else search.overlap, devices)
        timed = search.begin(max(devices, key=_is_gpu))
        losses = self._run(batches, search.overlap, devices)
        calls = [each.searched_call for _, each in named_layers(self._model)]
        search.end(timed, [one for one in calls if one is not None])
        return losses

    def _run(
        self, batches: Sequence[Batch], overlap: StepOverlap, devices: set[torch.device]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state, generators = ThreadState.of_this_thread(devices), generators_of(devices)
        draws = Draws.going_on(generators), Draws.beside(generators)
        with draws[0].left():
            if overlap == "chunks":
                return self._one_after_the_other(batches, draws, state)
            return self._in_turns(batches, draws, state, in_one_chunk=overlap == "batch")

    def _one_after_the_other(
        self, batches: Sequence[Batch], draws: Sequence[Draws], state: ThreadState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with unreduced(self._model):
            first = self._pass(batches[0], state)
        draws[0].keep()
        draws[1].put()
        return first, self._pass(batches[1], state)

    def _in_turns(
        self,
        batches: Sequence[Batch],
        draws: Sequence[Draws],
        state: ThreadState,
        *,
        in_one_chunk: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turns = Turns(waits_on_host=state.gpu is None)
        halves = Halves(self._split) if self._split else None
        leads, follows = (
            BatchTurn(turns, number, draws=one, in_one_chunk=in_one_chunk, halves=halves)
            for number, one in enumerate(draws)
        )
        with batches_of(self._model):
            following = self._follower.submit(
                copy_context().run, self._in_turn, follows, batches[1], state
            )
            try:
                loss = self._in_turn(leads, batches[0], state)
            except OtherBatchError:
                following.result()
                raise
            except BaseException:
                following.exception()
                raise
            return loss, following.result()

    def _in_turn(self, turn: BatchTurn, batch: Batch, state: ThreadState) -> torch.Tensor:
        with in_turn(turn), state.on_streams(), _backward_in_this_thread():
            return self._pass(batch, state)

    def _pass(self, batch: Batch, state: ThreadState) -> torch.Tensor:
        with state.autocast(is_on=True):
            loss = self._loss_of(batch)
        begin_backward_of_half()
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


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _search_of(model: nn.Module) -> OverlapSearch | None:
    """Return a search of the first plan book of a layer that searches; None where none does."""
    found = (each.planbook.overlap_search() for _, each in named_layers(model))
    return next((one for one in found if one is not None), None)


def _check(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FSDPModule)):
            raise InputError(
                f"{type(module).__name__} takes one backward pass at a time",
                "average gradients with moetune.replicate(model) in its place",
            )


def _check_halves(model: nn.Module, split: BatchSplit) -> None:
    """Raise InputError where a layer's numbers would be those of half a batch."""
    if split not in BATCH_SPLITS:
        raise InputError(f"split must be one of {', '.join(BATCH_SPLITS)}, got {split!r}")
    for name, module in model.named_modules():
        gate, config = getattr(module, "gate", None), getattr(module, "config", None)
        if isinstance(gate, Gate) and gate.capacity_factor is not None:
            raise InputError(
                f"{name} drops the lightest of all tokens' pairs, and half of them is not enough "
                "to know these",
                "give it no capacity_factor, or BatchOverlap whole batches",
            )
        if isinstance(module, _BatchNorm):
            raise InputError(
                f"{name} normalizes by all tokens of a batch, and would by those of half",
                "use a norm of each token, or give BatchOverlap whole batches",
            )
        if getattr(config, "output_router_logits", False):
            raise InputError(
                f"{type(module).__name__} adds a balance loss of the tokens that it is given, half "
                "of a batch",
                "set config.output_router_logits = False, or give BatchOverlap whole batches",
            )
