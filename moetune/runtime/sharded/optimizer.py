"""The optimizer of a sharded model: step each chunk's shard as its reduced gradients arrive.

Last part of a training step: takes complete reductions from `manager`, and publishes new values.
"""

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moetune.comm.group import Communicator
from moetune.domain.errors import InputError, RankMismatchError
from moetune.runtime.sharded.manager import ChunkManager
from moetune.runtime.sharded.parameter_shards import ParameterShard, over_shards, parameter_shards
from moetune.runtime.sharded.placement import SideStream
from moetune.runtime.sharded.replicas import REDUCTION
from moetune.runtime.sharded.stored import StoredChunk


class ChunkedOptimizer(Optimizer):
    """Steps the shards as the given optimizer would step the whole model.

    Parameters without a gradient on any rank since `zero_grad` are skipped, as `torch.optim` skips
    those whose `grad` is None. A step is a collective: all ranks call it. Chunks are stepped while
    later ones are still being reduced.

    Args:
        optimizer: fresh, over parameters of the model.
        replicas: the data-parallel ranks.
        reduce_stream: of the gradients' copies to the host.
        in_backward: chunks are stepped within the backward pass.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        manager: ChunkManager,
        replicas: Communicator,
        reduce_stream: SideStream,
        *,
        in_backward: bool,
    ) -> None:
        self._manager, self._replicas, self._reduce_stream = manager, replicas, reduce_stream
        self._names = sorted(manager.parameters)
        names = {id(parameter): name for name, parameter in manager.parameters.items()}
        groups = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
        self._group_number = {name: number for number, group in enumerate(groups) for name in group}
        self.shards = parameter_shards(manager.chunks)
        self._shards_by_chunk = {
            number: tuple(shards)
            for number, shards in groupby(self.shards, key=lambda shard: shard.chunk.number)
        }
        by_name = {shard.name: shard.values for shard in self.shards}
        values = [[by_name[name] for name in group if name in by_name] for group in groups]
        self._inner = over_shards(optimizer, values)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._in_backward, self._begun = in_backward, dict[int, Future[None] | None]()
        if in_backward:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="moetune-steps")
            manager.cache.on_reduced = self._step_in_backward
            manager.cache.finish_step = self._finish_step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch
        """Step every shard and publish the values for the next gathers.

        Raises:
            RankMismatchError: the ranks used their chunks in different orders.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        done = self._step_complete()
        got = self._agree()
        for chunk in self._manager.chunks:
            if chunk.number not in done:
                self._step_chunk(chunk, got)
        self._manager.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT002 - torch's signature
        """Discard all gradients."""
        self._manager.finish_reductions()
        self._manager.got_gradient.clear()
        for chunk in self._manager.chunks:
            chunk.has_gradient = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm.

        As `torch.nn.utils.clip_grad_norm_` on the whole model. A collective.
        """
        if self._in_backward:
            raise InputError(
                "gradients cannot be clipped after chunks were stepped in the backward pass",
                "use moetune.shard without step_in_backward",
            )
        self._manager.finish_reductions()
        self._reduce_stream.synchronize()
        norm = self._replicas.all_reduce_values(self._square_sum(), REDUCTION).sqrt()
        scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        if scale < 1:
            for chunk in self._manager.chunks:
                if chunk.has_gradient and chunk.gradient is not None:
                    chunk.gradient.mul_(scale)
        return norm

    def _square_sum(self) -> torch.Tensor:
        """Return this rank's part of the squared norm on the CPU: one wait for each device."""
        totals: dict[torch.device, torch.Tensor] = {}
        for shard in self.shards:
            if shard.chunk.has_gradient and shard.chunk.gradient is not None:
                part = shard.chunk.gradient[shard.low : shard.high]
                copies = shard.chunk.replicas.num_ranks if shard.chunk.is_resident else 1
                square = part.double().square().sum() / copies
                totals[part.device] = totals.get(part.device, torch.zeros_like(square)) + square
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        return sum((each.cpu() for each in totals.values()), start=zero)

    def _step_in_backward(self, chunk: StoredChunk) -> None:
        """Step a chunk within the backward pass, once all its gradients are reduced.

        In a thread, if its shard is on the host while a GPU computes: whoever reads or writes the
        chunk's states finishes its step first.

        Raises:
            InputError: it was stepped already, before a second backward pass.
        """
        if not self._is_complete(chunk):
            return
        if chunk.number in self._begun:
            raise InputError(
                f"{chunk.names[0]} got a gradient after it was stepped in the backward pass",
                "with several backward passes a step, use moetune.shard without step_in_backward",
            )
        self._begun[chunk.number] = None
        if chunk.is_offloaded and chunk.whole.device.type != "cpu":
            self._begun[chunk.number] = self._thread.submit(self._step_chunk, chunk)
        else:
            self._step_chunk(chunk)

    def _finish_step(self, chunk: StoredChunk) -> None:
        if future := self._begun.get(chunk.number):
            self._begun[chunk.number] = None
            future.result()

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The groups' settings, such as the learning rate."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.param_groups
        ]

    @settings.setter
    def settings(self, settings: list[dict[str, Any]]) -> None:
        for group, new in zip(self.param_groups, settings, strict=True):
            group.update(new)

    def _step_complete(self) -> set[int]:
        """Step the chunks with all their gradients, as reductions end, and return their numbers."""
        if self._in_backward:
            self._manager.finish_reductions()
            begun, self._begun = self._begun, {}
            return set(begun)
        # Chunks that are complete already go first: their steps overlap the last reductions,
        # which hides the optimizer on a slow network.
        done = {chunk.number for chunk in self._manager.chunks if self._is_complete(chunk)}
        for number in done:
            self._step_chunk(self._manager.chunks[number])
        while (chunk := self._manager.finish_reduction()) is not None:
            if self._is_complete(chunk):
                self._step_chunk(chunk)
                done.add(chunk.number)
        return done

    def _is_complete(self, chunk: StoredChunk) -> bool:
        """Return whether all gradients of a chunk are reduced into this rank's shard.

        Then all of its parameters are stepped, without `_agree`: each has a gradient here.
        """
        return (
            chunk.has_gradient
            and not chunk.has_unreduced_gradients
            and chunk.phase != "reducing"
            and self._manager.got_gradient.issuperset(chunk.names)
        )

    @torch.no_grad()
    def _step_chunk(self, chunk: StoredChunk, got: Container[str] | None = None) -> None:
        """Step this rank's shard of a chunk: the parameters in `got`, or all."""
        if not chunk.has_gradient or chunk.gradient is None:
            return
        chunk.make_readable()
        chunk.make_writable()
        shards = self._shards_by_chunk.get(chunk.number, ())
        for shard in shards:
            if got is None or shard.name in got:
                shard.values.grad = chunk.gradient[shard.low : shard.high]
        self._step_inner(shards)
        for shard in shards:
            shard.values.grad = None
        chunk.publish()

    def _step_inner(self, shards: Sequence[ParameterShard]) -> None:
        """Step these shards: the whole model's groups would be walked once for every chunk.

        By an optimizer of the same states and settings, as another thread may step another chunk.
        """
        members: dict[int, list[nn.Parameter]] = {}
        for shard in shards:
            if shard.name in self._group_number:  # else the optimizer never had it
                members.setdefault(self._group_number[shard.name], []).append(shard.values)
        groups = [
            {**self.param_groups[number], "params": values} for number, values in members.items()
        ]
        one = object.__new__(type(self._inner))
        one.__dict__.update(self._inner.__dict__, param_groups=groups)
        one.step()

    def _agree(self) -> set[str]:
        """Return the parameters that got a gradient on some rank, once the orders are equal."""
        got = self._manager.got_gradient
        if self._replicas.num_ranks == 1:
            return got
        seen = self._manager.cache.digest
        # The maxima of `seen` and of its negative are opposite only if all ranks have the same.
        flags = [*(name in got for name in self._names), seen, -seen]
        mine = torch.tensor(flags, dtype=torch.int64, device="cpu")
        found = self._replicas.all_reduce_values(mine, "the agreement on a step", op="max").tolist()
        if found[-2] != -found[-1]:
            raise RankMismatchError(
                "the ranks gathered and reduced their chunks in different orders",
                "every rank must call the same modules in the same order",
            )
        return {name for name, flag in zip(self._names, found, strict=False) if flag}
