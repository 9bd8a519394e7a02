"""`moetune.model_chunks`: fetch, hold and reduce a model's chunks as its modules run.

Hooks call it when a module's call begins or ends, forward and backward, and when a gradient is
complete; it calls the `cache`, which moves the chunks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from moetune.comm.group import Communicator
from moetune.domain.chunks import Chunk, Use
from moetune.domain.errors import InputError
from moetune.domain.units import format_bytes
from moetune.runtime.autograd import is_in_backward
from moetune.runtime.sharded.cache import Cache
from moetune.runtime.sharded.hooks import ModuleCall, Unit, guard_reads, outputs_of, with_end
from moetune.runtime.sharded.stored import ChunkStats, StoredChunk, Traffic

_ATTRIBUTE = "_moetune_chunks"


class ModelChunks:
    """The chunks of a sharded model: holds them for the calls that read them.

    Args:
        stored: the states of every chunk on this rank.
        parameters: the model's, by name.
        stats: that the chunks count in.
        replicas: the data-parallel ranks.

    Attributes:
        got_gradient: names of parameters with a gradient since `zero_grad`, on this rank.
        clip_grad_norm_: of the optimizer over these chunks, which `shard` makes.
    """

    clip_grad_norm_: Callable[[float], torch.Tensor]

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        stored: Sequence[StoredChunk],
        parameters: dict[str, nn.Parameter],
        cache: Cache,
        stats: ChunkStats,
        replicas: Communicator,
    ) -> None:
        self.stored, self.parameters, self.replicas = tuple(stored), parameters, replicas
        self.cache, self._stats = cache, stats
        self._model = model
        self._chunk_of = {name: chunk for chunk in stored for name in chunk.names}
        self._running: list[ModuleCall] = []
        self._open: list[ModuleCall] = []
        self._pending: dict[int, dict[str, torch.Tensor]] = {}
        self._arrived: set[str] = set()
        self.got_gradient: set[str] = set()
        self._is_backward = False
        self._is_new_step = True
        for name, parameter in parameters.items():
            guard_reads(parameter, name, self._is_held)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_hook(name))
        self._hook_root(model)
        for unit in units:
            self._hook(unit)
        object.__setattr__(model, _ATTRIBUTE, self)
        model.register_state_dict_pre_hook(_refuse)
        model.register_load_state_dict_pre_hook(_refuse)

    def __repr__(self) -> str:
        moved = self.traffic
        return (
            f"{len(self.stored)} chunks, cache of {self.cache_capacity}; {moved.gathers} gathered, "
            f"{moved.reduces} reduced; at most {format_bytes(self.peak_device_bytes)} on the device"
        )

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks and their parameters."""
        return tuple(stored.chunk for stored in self.stored)

    @property
    def order(self) -> tuple[Use, ...]:
        """The uses of the last whole training step; empty before the second one begins."""
        return self.cache.order

    @property
    def cache_capacity(self) -> int:
        """Whole chunks that the cache may hold."""
        return self.cache.capacity

    @property
    def traffic(self) -> Traffic:
        """Transfers since the model was sharded."""
        return self._stats.traffic

    @property
    def peak_cache_bytes(self) -> int:
        """Most bytes of whole chunks at once in the cache."""
        return self._stats.peak_cache_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Most bytes of chunks, shards and gradients at once on the device."""
        return self._stats.peak_device_bytes

    def end_step(self) -> None:
        """Evict the values that the optimizer has just changed, and begin the next step."""
        self.cache.evict(only_trainable=True)
        self.cache.begin_step(trains=True)
        self._is_new_step = False

    def invalidate(self) -> None:
        """Evict cached values, after the shards were changed."""
        self.cache.evict(only_trainable=False)

    def finish_reduction(self) -> StoredChunk | None:
        """Wait for the oldest reduction and return its chunk, None where there is none."""
        self._abandon_backward()
        return self.cache.finish_reduction()

    def finish_reductions(self) -> None:
        """Wait for all reductions under way."""
        self._abandon_backward()
        self.cache.finish_reductions()

    def _is_held(self, name: str) -> bool:
        """Return whether a call that is under way holds a parameter's values."""
        if any(name in call.names for call in self._running):
            return True
        chunk = self._chunk_of[name]
        return is_in_backward() and chunk.num_readers > 0 and not chunk.has_lost(frozenset((name,)))

    def _hook_root(self, model: nn.Module) -> None:
        def before(_: nn.Module, __: object) -> None:
            if not is_in_backward():
                self._begin_pass()

        def after(_: nn.Module, __: object, result: object) -> None:
            for tensor in outputs_of(result):
                tensor.register_hook(lambda _: self._begin_backward())

        model.register_forward_pre_hook(before, prepend=True)
        model.register_forward_hook(after)

    def _hook(self, unit: Unit) -> None:
        trainable = frozenset(n for n in unit.parameters if self.parameters[n].requires_grad)
        names = frozenset(unit.parameters)
        numbers = tuple(dict.fromkeys(self._chunk_of[name].number for name in unit.parameters))
        label = f"{unit.name} ({unit.parameters[0]})"

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
            return self._forward(ModuleCall(label, numbers, names, trainable), (args, kwargs))

        def after(_: nn.Module, __: object, result: object) -> None:
            if self._running and self._running[-1].label == label:
                self._end_forward(self._running[-1], result)

        unit.module.register_forward_pre_hook(before, with_kwargs=True)
        unit.module.register_forward_hook(after, always_call=True)

    def _forward(self, call: ModuleCall, arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        self._acquire(call)
        self._running.append(call)
        if torch.is_grad_enabled():
            arguments, call.has_end = with_end(arguments, lambda: self._end_backward_of(call))
        return arguments

    def _end_forward(self, call: ModuleCall, result: object) -> None:
        self._running.remove(call)
        self._release(call.chunks)
        if torch.is_grad_enabled():
            for tensor in outputs_of(result):
                tensor.register_hook(lambda _: self._begin_backward_of(call))

    def _begin_backward_of(self, call: ModuleCall) -> None:
        self._begin_backward()
        if not call.is_open:
            call.is_open = True
            self._acquire(call)
            self._open.append(call)

    def _end_backward_of(self, call: ModuleCall) -> None:
        if call.is_open:
            call.is_open = False
            self._open.remove(call)
            self._release(call.chunks)

    def _acquire(self, call: ModuleCall) -> None:
        self.cache.use(call.chunks, call.names, call.label)
        for number in call.chunks:
            self.stored[number].num_readers += 1

    def _release(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            chunk = self.stored[number]
            chunk.num_readers -= 1
            if not chunk.num_readers:
                self._store_gradients(chunk)

    def _begin_pass(self) -> None:
        self._check_parameters()
        self._abandon_backward()
        self._running.clear()
        trains = torch.is_grad_enabled()
        if not trains or self._is_new_step:
            self.cache.begin_step(trains=trains)
            self._is_new_step = not trains

    def _check_parameters(self) -> None:
        now = {id(each): name for name, each in self._model.named_parameters()}
        known = {id(each): name for name, each in self.parameters.items()}
        if changed := now.keys() ^ known.keys():
            name = min((known | now)[each] for each in changed)
            raise InputError(
                f"{name} was added, replaced or removed after the model was sharded",
                "change the model before moetune.shard",
            )

    def _begin_backward(self) -> None:
        if not self._is_backward:
            self._is_backward = True
            self._arrived.clear()
            Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001 - as FSDP does

    def _end_backward(self) -> None:
        """Release all chunks, and reduce what is not reduced, in the order of chunks.

        A chunk without any gradient on this rank takes part in its ranks' reduction.
        """
        self._is_backward = False
        for call in tuple(self._open):
            self._end_backward_of(call)
        for chunk in self.stored:
            is_missing = chunk.chunk.group.is_trainable and self._arrived.isdisjoint(chunk.names)
            if is_missing and chunk.replicas.num_ranks > 1:
                self._make_ready(chunk)
                self.cache.reduce(chunk)
            elif chunk.has_unreduced_gradients:
                self.cache.reduce(chunk)

    def _abandon_backward(self) -> None:
        """Discard the state of a backward pass that raised."""
        if self._is_backward and not is_in_backward():
            self._is_backward = False
            self._open.clear()
            self._pending.clear()
            self.cache.abandon_backward()

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            chunk = self._chunk_of[name]
            self._begin_backward()
            self._arrived.add(name)
            self.got_gradient.add(name)
            self._pending.setdefault(chunk.number, {})[name] = parameter
            for call in tuple(self._open):
                if not call.has_end and call.trainable and call.trainable <= self._arrived:
                    self._end_backward_of(call)
            if not chunk.num_readers:
                self._store_gradients(chunk)

        return hook

    def _store_gradients(self, chunk: StoredChunk) -> None:
        """Put gradients into their chunk, which no call reads any more; reduce it when full."""
        pending = self._pending.pop(chunk.number, None)
        if not pending:
            return
        self._make_ready(chunk)
        with torch.no_grad():
            for name, parameter in pending.items():
                assert parameter.grad is not None  # noqa: S101 - its hook ran
                chunk.receive(name, parameter.grad)
                parameter.grad = None
        if len(chunk.arrived) == len(chunk.names):
            self.cache.reduce(chunk)

    def _make_ready(self, chunk: StoredChunk) -> None:
        """Allocate a chunk's buffer for its gradients."""
        if chunk.phase == "reducing":
            self.cache.finish_reductions()
        chunk.finish_gather()
        if chunk.phase == "away":
            self.cache.allocate_for_gradients(chunk)


def _refuse(module: nn.Module, *_: object) -> None:
    raise InputError(
        f"the parameters of this {type(module).__name__} are in shards",
        "use moetune.full_state_dict and moetune.load_full_state_dict",
    )


def model_chunks(model: nn.Module) -> ModelChunks:
    """Return the chunks of a sharded model.

    Raises:
        InputError: it is not sharded.
    """
    found = getattr(model, _ATTRIBUTE, None)
    if not isinstance(found, ModelChunks):
        raise InputError(f"this {type(model).__name__} is not sharded", "call moetune.shard first")
    return found
