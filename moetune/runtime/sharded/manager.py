"""Watches a model's calls and gradients, and keeps its chunks where they are needed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from moetune.runtime.sharded.cache import Cache
from moetune.runtime.sharded.hooks import (
    Call,
    ChunkedParameter,
    Structure,
    guard,
    is_view,
    outputs_of,
    with_end,
)
from moetune.runtime.sharded.layout import Unit
from moetune.runtime.sharded.schedule import FirstUses
from moetune.runtime.sharded.stored import StoredChunk


class ChunkManager:
    """Brings chunks in for calls and lets them go, forward and backward.

    Args:
        chunks: of the model.
        parameters: the model's, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        chunks: Sequence[StoredChunk],
        parameters: dict[str, nn.Parameter],
        cache: Cache,
    ) -> None:
        self.cache, self.parameters = cache, parameters
        self.first_uses = FirstUses()
        self._running: list[Call] = []
        self._open: list[Call] = []
        self._lingering: dict[int, frozenset[str]] = {}
        self._pending: dict[int, dict[str, torch.Tensor]] = {}
        self._arrived: set[str] = set()
        self.got_gradient: set[str] = set()
        self._is_backward = False
        self._is_new_step = True
        self._structure = Structure(model)
        self._place_in(chunks)
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrival(name))
        self._hook_root(model)
        for unit in units:
            self._hook(unit)

    def adopt(self, chunks: Sequence[StoredChunk], places: int) -> None:
        """Keep other chunks from now on, which have the same parameters; none is in the cache."""
        self._place_in(chunks)
        self.cache.adopt(chunks, places)

    def _place_in(self, chunks: Sequence[StoredChunk]) -> None:
        self.chunks = chunks
        self._home = {name: chunk for chunk in chunks for name in chunk.names}
        self._numbers: dict[str, tuple[int, ...]] = {}
        for name, parameter in self.parameters.items():
            guard(parameter, name, self._home[name].number, self)

    def end_step(self) -> None:
        """The optimizer has changed the values: what is cached is old, and the next step begins."""
        self.cache.evict(only_trainable=True)
        self.cache.begin_step(trains=True)
        self._is_new_step = False

    def renew(self) -> None:
        """Let go of all values, frozen ones too."""
        self.cache.evict(only_trainable=False)

    def settle_one(self) -> StoredChunk | None:
        """Wait for the gradients that are first under way, and return their chunk."""
        self._abandon_backward()
        return self.cache.settle_one()

    def settle(self) -> None:
        """Wait for all gradients under way."""
        self._abandon_backward()
        self.cache.settle()

    # Functions that read parameters

    def run(
        self,
        parameters: Sequence[ChunkedParameter],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - what the function returns
        """Run a function that reads parameters; it is a call of its own where no module's is."""
        held = self._running[-1].chunks if self._running else ()
        foreign = [each for each in parameters if each.chunk_number not in held]
        foreign = [each for each in foreign if not self.chunks[each.chunk_number].stays]
        if not foreign or (_in_backward() and all(self._is_held(each) for each in foreign)):
            return function(*args, **kwargs)
        numbers = tuple(dict.fromkeys(each.chunk_number for each in foreign))
        self.first_uses.note(each.name_in_model for each in foreign)
        names = frozenset(each.name_in_model for each in foreign)
        trainable = frozenset(each.name_in_model for each in foreign if each.requires_grad)
        call = Call(foreign[0].name_in_model, numbers, names, trainable)
        (args, kwargs), result = self._forward(call, (args, kwargs)), None
        try:
            result = function(*args, **kwargs)
        finally:
            self._end_forward(call, result)
        if is_view(result, foreign):
            self._linger(numbers, names)
        return result

    def _is_held(self, parameter: ChunkedParameter) -> bool:
        chunk = self.chunks[parameter.chunk_number]
        return chunk.holds > 0 and not chunk.has_lost(frozenset((parameter.name_in_model,)))

    def _linger(self, numbers: Iterable[int], names: frozenset[str]) -> None:
        """Hold chunks of which somebody has a view, until this pass ends."""
        for number in numbers:
            if number not in self._lingering:
                self.cache.use((number,), names, self.chunks[number].names[0])
                self.chunks[number].holds += 1
                self._lingering[number] = names

    # Calls

    def _hook_root(self, model: nn.Module) -> None:
        def before(_: nn.Module, __: object) -> None:
            if not _in_backward():
                self._begin_pass()

        def after(_: nn.Module, __: object, result: object) -> None:
            if not _in_backward() and not torch.is_grad_enabled():
                self._stop_lingering()
            for tensor in outputs_of(result):
                tensor.register_hook(lambda _: self._begin_backward())

        model.register_forward_pre_hook(before, prepend=True)
        model.register_forward_hook(after)

    def _hook(self, unit: Unit) -> None:
        trainable = frozenset(n for n in unit.parameters if self.parameters[n].requires_grad)
        names = frozenset(unit.parameters)
        who = f"{unit.name} ({unit.parameters[0]})"

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ANN401
            self.first_uses.note(unit.parameters)
            return self._forward(Call(who, self._chunks_of(unit), names, trainable), (args, kwargs))

        def after(_: nn.Module, __: object, result: object) -> None:
            if self._running and self._running[-1].who == who:
                self._end_forward(self._running[-1], result)

        unit.module.register_forward_pre_hook(before, with_kwargs=True)
        unit.module.register_forward_hook(after, always_call=True)

    def _chunks_of(self, unit: Unit) -> tuple[int, ...]:
        if unit.name not in self._numbers:
            found = dict.fromkeys(self._home[name].number for name in unit.parameters)
            self._numbers[unit.name] = tuple(found)
        return self._numbers[unit.name]

    def _forward(self, call: Call, arguments: tuple[Any, Any]) -> tuple[Any, Any]:
        self._hold(call)
        self._running.append(call)
        if torch.is_grad_enabled():
            arguments, call.has_end = with_end(arguments, lambda: self._end_backward_of(call))
        return arguments

    def _end_forward(self, call: Call, result: object) -> None:
        self._running.remove(call)
        self._release(call.chunks)
        if torch.is_grad_enabled():
            for tensor in outputs_of(result):
                tensor.register_hook(lambda _: self._begin_backward_of(call))

    def _begin_backward_of(self, call: Call) -> None:
        self._begin_backward()
        if not call.is_open:
            call.is_open = True
            self._hold(call)
            self._open.append(call)

    def _end_backward_of(self, call: Call) -> None:
        if call.is_open:
            call.is_open = False
            self._open.remove(call)
            self._release(call.chunks)

    def _hold(self, call: Call) -> None:
        if self.first_uses.is_open:
            beside = (each.names for each in (*self._running, *self._open))
            self.first_uses.note_together((call.names, *beside, *self._lingering.values()))
        self.cache.use(call.chunks, call.names, call.who)
        for number in call.chunks:
            self.chunks[number].holds += 1

    def _stop_lingering(self) -> None:
        numbers, self._lingering = self._lingering, {}
        self._release(numbers)

    def _release(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            chunk = self.chunks[number]
            chunk.holds -= 1
            if not chunk.holds:
                self._place(chunk)

    # Passes

    def _begin_pass(self) -> None:
        self._structure.check()
        self._abandon_backward()
        self._running.clear()
        self._stop_lingering()
        trains = torch.is_grad_enabled()
        if not trains or self._is_new_step:
            self.cache.begin_step(trains=trains)
            self._is_new_step = not trains

    def _begin_backward(self) -> None:
        if not self._is_backward:
            self._is_backward = True
            self._arrived.clear()
            Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001 - as FSDP does

    def _end_backward(self) -> None:
        """Let go of everything, and reduce what is not reduced, in the order of chunks."""
        self._is_backward = False
        for call in tuple(self._open):
            self._end_backward_of(call)
        self._stop_lingering()
        for chunk in self.chunks:
            is_missing = chunk.chunk.group.is_trainable and not self._arrived.intersection(
                chunk.names
            )
            if is_missing and chunk.team.num_ranks > 1:
                self._make_ready(chunk)
                self.cache.reduce(chunk)
            elif chunk.has_gradients:
                self.cache.reduce(chunk)

    def _abandon_backward(self) -> None:
        """Clear up after a backward pass that raised."""
        if self._is_backward and not _in_backward():
            self._is_backward = False
            self._open.clear()
            self._pending.clear()
            self._lingering.clear()
            self.cache.forget()

    # Gradients

    def _arrival(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            chunk = self._home[name]
            self._begin_backward()
            self._arrived.add(name)
            self.got_gradient.add(name)
            self._pending.setdefault(chunk.number, {})[name] = parameter
            for call in tuple(self._open):
                if not call.has_end and call.trainable and call.trainable <= self._arrived:
                    self._end_backward_of(call)
            if not chunk.holds:
                self._place(chunk)

        return hook

    def _place(self, chunk: StoredChunk) -> None:
        """Put gradients into their chunk, which nobody reads any more; reduce it when full."""
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
        """Give a chunk a buffer for its gradients."""
        if chunk.phase == "reducing":
            self.cache.settle()
        chunk.finish_gather()
        if chunk.phase == "away":
            self.cache.make_blank(chunk)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - torch has no public name
