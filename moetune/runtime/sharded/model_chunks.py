"""`moetune.model_chunks`: report to the cache which chunks a model's modules use as they run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from moetune.comm.group import Communicator
from moetune.domain.errors import InputError, RankMismatchError
from moetune.runtime.autograd import is_in_backward
from moetune.runtime.parallel.fsdp import forget_failed_passes
from moetune.runtime.sharded.cache import Cache, GatheredChunk

_ATTRIBUTE = "_moetune_chunks"


class ModelChunks:
    """The hooks that report the passes of a sharded model's modules to its cache.

    Args:
        model: a model under FSDP2; parameters that it reads itself stay gathered, in no chunk.
        replicas: the data-parallel ranks.

    Attributes:
        cache: cache of the gathered chunks.
    """

    def __init__(self, model: nn.Module, cache: Cache, replicas: Communicator) -> None:
        self.cache, self._model, self._replicas = cache, model, replicas
        self._running: list[GatheredChunk] = []
        self._is_forward = self._is_backward = False
        self._is_new_step = True
        self._task = -1
        object.__setattr__(model, _ATTRIBUTE, self)
        model.register_forward_hook(self._end_forward)

    def watch_backward(self, chunk: GatheredChunk) -> None:
        """Use a chunk when its modules' backward passes begin; call it before FSDP2 adds hooks."""
        for unit in chunk.units:
            unit.module.register_forward_hook(partial(self._watch_outputs, chunk, unit.name))

    def _watch_outputs(
        self,
        chunk: GatheredChunk,
        label: str,
        _: nn.Module,
        __: object,
        result: Any,  # noqa: ANN401 - of any module
    ) -> Any:  # noqa: ANN401
        return with_hooks(result, lambda _: self._use_backward(chunk, label))

    def watch_forward(self, chunk: GatheredChunk) -> None:
        """Use a chunk for its modules' calls, by hooks in front of FSDP2's existing hooks."""

        def before(label: str, _: nn.Module, __: object) -> None:
            self.cache.use(chunk, label, is_training=torch.is_grad_enabled())
            chunk.num_running += 1
            self._running.append(chunk)

        def after(_: nn.Module, __: object, ___: object) -> None:
            if chunk in self._running:
                self._running.remove(chunk)
                chunk.num_running -= 1

        for unit in chunk.units:
            unit.module.register_forward_pre_hook(partial(before, unit.name), prepend=True)
            unit.module.register_forward_hook(after, always_call=True)

    def watch_model(self) -> None:
        """Begin passes with the model's calls, by hooks in front of FSDP2's existing hooks."""
        assert isinstance(self._model, FSDPModule)  # noqa: S101 - of `shard`
        self._model.set_modules_to_backward_prefetch([self._model])
        self._model.register_forward_pre_hook(lambda *_: self._begin_pass(), prepend=True)

    def _end_forward(self, _: nn.Module, __: object, result: Any) -> Any:  # noqa: ANN401 - as above
        self._is_forward = False
        return with_hooks(result, lambda _: self._begin_backward())

    def end_step(self) -> None:
        """Free the gathered chunks, because the shards have new values."""
        self.cache.evict()
        assert isinstance(self._model, FSDPModule)  # noqa: S101 - of `shard`
        self._model.reshard()
        self._is_new_step = True

    def agree(self) -> None:
        """Check that all ranks gathered the same chunks in the same order; a collective.

        Raises:
            RankMismatchError: the ranks gathered different chunks, or in another order.
        """
        digest = self.cache.digest
        mine = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
        most, least = self._replicas.all_reduce_values(mine, "the agreement on a step", op="max")
        if most != -least:
            raise RankMismatchError(
                "the ranks gathered their chunks in different orders",
                "every rank must call the same modules in the same order",
            )

    def _begin_pass(self) -> None:
        if is_in_backward():
            return
        if self._is_forward or self._is_backward:  # an error has ended the last
            for chunk in self._running:
                chunk.num_running = 0
            self._running.clear()
            forget_failed_passes([self._model])
            self._is_backward = False
        self._is_forward = True
        if torch.is_grad_enabled() and self._is_new_step:
            self.cache.begin_step()
            self._is_new_step = False

    def _begin_backward(self) -> None:
        if not self._is_backward:
            self._is_backward, self._task = True, torch._C._current_graph_task_id()  # noqa: SLF001 - no public name
            Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001 - as FSDP does

    def _end_backward(self) -> None:
        self._is_backward = False

    def _use_backward(self, chunk: GatheredChunk, label: str) -> None:
        self._begin_backward()
        if self._task != torch._C._current_graph_task_id():  # noqa: SLF001
            raise InputError(
                f"{label} is computed again by a checkpoint with use_reentrant=True, behind whose "
                "backward pass FSDP2 takes the model's for over",
                "checkpoint with use_reentrant=False",
            )
        self.cache.use(chunk, label, is_training=True)
        chunk.is_open = True


def with_hooks(result: Any, hook: Callable[[torch.Tensor], None]) -> Any:  # noqa: ANN401 - of any module
    """Return a module's result, and call the hook for its gradients.

    A view becomes a plain tensor, because an in-place operation on a view would drop hooks.
    """
    if not torch.is_grad_enabled():
        return result
    if isinstance(result, torch.Tensor) and result._is_view():  # noqa: SLF001 - as FSDP does
        result = torch.ops.aten._unsafe_view(result, result.shape)  # noqa: SLF001
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)
    return result


def model_chunks(model: nn.Module) -> Cache:
    """Return the cache of a sharded model's chunks.

    Raises:
        InputError: the model is not sharded.
    """
    held = getattr(model, _ATTRIBUTE, None)
    if not isinstance(held, ModelChunks):
        raise InputError(f"this {type(model).__name__} is not sharded", "call moetune.shard first")
    return held.cache
