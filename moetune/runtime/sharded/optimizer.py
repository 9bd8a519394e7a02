"""Chunks that are stepped while the backward pass goes on."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moetune.domain.errors import InputError, RankMismatchError
from moetune.runtime.sharded.manager import ChunkManager
from moetune.runtime.sharded.pieces import ParameterShard, over_shards, pieces_of
from moetune.runtime.sharded.schedule import Uses
from moetune.runtime.sharded.stored import StoredChunk
from moetune.runtime.sharded.streams import SideStream
from moetune.runtime.sharded.team import Team


class EarlySteps:
    """Steps chunks of the step at hand, on a thread where the device is another one's.

    Args:
        step: of one chunk.
    """

    def __init__(self, step: Callable[[StoredChunk], None]) -> None:
        self._step = step
        self._begun: dict[int, Future[None] | None] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moetune-steps")

    def start(self, chunk: StoredChunk) -> None:
        """Step a chunk, beside the caller if the device works without the host.

        Raises:
            InputError: it was stepped before: a second backward pass brought gradients.
        """
        if chunk.number in self._begun:
            raise InputError(
                f"{chunk.names[0]} got a gradient after it was stepped in the backward pass",
                "with several backward passes a step, use moetune.shard without step_in_backward",
            )
        if chunk.is_offloaded and chunk.whole.device.type != "cpu":
            self._begun[chunk.number] = self._thread.submit(self._step, chunk)
        else:
            self._begun[chunk.number] = None
            self._step(chunk)

    def join(self) -> set[int]:
        """Wait for all steps, and return which chunks were stepped since the last time."""
        begun, self._begun = self._begun, {}
        for future in begun.values():
            if future is not None:
                future.result()
        return set(begun)


Repack = Callable[["ChunkedOptimizer", Uses], None]


class ChunkedOptimizer(Optimizer):
    """Steps the shards as the given optimizer would step the whole model.

    Parameters that got no gradient on any rank since `zero_grad` are left alone, as
    `torch.optim` leaves those whose `grad` is None. A step is a collective: all ranks call it.
    Chunks are stepped while later ones are still on their way.

    Args:
        optimizer: fresh, over parameters of the model.
        team: the data-parallel ranks.
        leaving: where gradients go to the host.
        repack: called after the first step with how parameters were used; may give other
            chunks to `adopt`.
        in_backward: chunks are stepped within the backward pass.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        keeper: ChunkManager,
        team: Team,
        leaving: SideStream,
        *,
        repack: Repack,
        in_backward: bool,
    ) -> None:
        self._keeper, self._team, self._leaving = keeper, team, leaving
        self._names = sorted(keeper.parameters)
        names = {id(parameter): name for name, parameter in keeper.parameters.items()}
        self._groups = [
            tuple(names[id(each)] for each in group["params"]) for group in optimizer.param_groups
        ]
        self._find_pieces()
        values = [self._values_of(members) for members in self._groups]
        self._inner = over_shards(optimizer, values)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._early = EarlySteps(self._step_chunk) if in_backward else None
        self._repack: Repack | None = repack
        if self._early is not None:
            keeper.cache.on_reduced = self._step_early

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
        for chunk in self._keeper.chunks:
            if chunk.number not in done:
                self._step_chunk(chunk, got)
        if self._repack is not None:
            self._keeper.renew()
            self._repack(self, self._keeper.first_uses.close())
            self._repack = None
        self._keeper.end_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT002 - torch's signature
        """Forget all gradients."""
        self._keeper.settle()
        self._keeper.got_gradient.clear()
        for chunk in self._keeper.chunks:
            chunk.has_gradient = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm.

        As `torch.nn.utils.clip_grad_norm_` on the whole model. A collective.
        """
        if self._early is not None:
            raise InputError(
                "gradients cannot be clipped after chunks were stepped in the backward pass",
                "use moetune.shard without step_in_backward",
            )
        self._keeper.settle()
        self._leaving.synchronize()
        total = torch.zeros((), dtype=torch.float64)
        for piece in self.pieces:
            if piece.chunk.has_gradient and piece.chunk.gradient is not None:
                part = piece.chunk.gradient[piece.low : piece.high]
                copies = piece.chunk.team.num_ranks if piece.chunk.stays else 1
                total += part.double().square().sum().cpu() / copies
        norm = self._team.sum(total).sqrt()
        scale = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        if scale < 1:
            for chunk in self._keeper.chunks:
                if chunk.has_gradient and chunk.gradient is not None:
                    chunk.gradient.mul_(scale)
        return norm

    def _step_early(self, chunk: StoredChunk) -> None:
        """Step a chunk within the backward pass, once nothing of it is missing."""
        assert self._early is not None  # noqa: S101 - else nobody calls
        if self._is_complete(chunk):
            self._early.start(chunk)

    @property
    def chunks(self) -> tuple[StoredChunk, ...]:
        """The model's chunks on this rank."""
        return tuple(self._keeper.chunks)

    def pieces_in(self, chunk: StoredChunk) -> tuple[ParameterShard, ...]:
        """Return this rank's parts of a chunk's parameters."""
        return self._pieces.get(chunk.number, ())

    def adopt(
        self,
        chunks: Sequence[StoredChunk],
        states: Mapping[str, dict[str, Any]],
        places: int,
    ) -> None:
        """Step other chunks from now on, which have the same parameters.

        Args:
            states: of this rank's part of every parameter.
            places: of the cache.
        """
        self._keeper.adopt(chunks, places)
        self._find_pieces()
        self.state.clear()
        for group, members in zip(self.param_groups, self._groups, strict=True):
            group["params"][:] = self._values_of(members)
        for piece in self.pieces:
            if piece.name in states:
                self.state[piece.values] = states[piece.name]

    def _find_pieces(self) -> None:
        self.pieces = pieces_of(self._keeper.chunks)
        self._pieces = {
            number: tuple(pieces)
            for number, pieces in groupby(self.pieces, key=lambda piece: piece.chunk.number)
        }

    def _values_of(self, names: Iterable[str]) -> list[nn.Parameter]:
        values = {piece.name: piece.values for piece in self.pieces}
        return [values[name] for name in names if name in values]

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
        """Step the chunks of which nothing is missing, as they come, and return them."""
        if self._early is not None:
            self._keeper.settle()
            return self._early.join()
        done = {chunk.number for chunk in self._keeper.chunks if self._is_complete(chunk)}
        for number in done:
            self._step_chunk(self._keeper.chunks[number])
        while (chunk := self._keeper.settle_one()) is not None:
            if self._is_complete(chunk):
                self._step_chunk(chunk)
                done.add(chunk.number)
        return done

    def _is_complete(self, chunk: StoredChunk) -> bool:
        """Whether all gradients of a chunk are where this rank keeps them.

        Then every one of its parameters is to be stepped, whatever the other ranks have.
        """
        return (
            chunk.has_gradient
            and not chunk.has_gradients
            and chunk.phase != "reducing"
            and self._keeper.got_gradient.issuperset(chunk.names)
        )

    @torch.no_grad()
    def _step_chunk(self, chunk: StoredChunk, got: Container[str] | None = None) -> None:
        """Step this rank's part of a chunk: the parameters in `got`, or all."""
        if not chunk.has_gradient or chunk.gradient is None:
            return
        if chunk.is_offloaded:
            self._leaving.synchronize()
        pieces = self.pieces_in(chunk)
        for piece in pieces:
            if got is None or piece.name in got:
                piece.values.grad = chunk.gradient[piece.low : piece.high]
        self._inner.step()
        for piece in pieces:
            piece.values.grad = None
        chunk.publish()

    def _agree(self) -> set[str]:
        """Return the parameters that got a gradient on some rank, once the orders are equal."""
        mine = self._keeper.got_gradient
        if self._team.num_ranks == 1:
            return mine
        seen = self._keeper.cache.digest
        flags = [*(name in mine for name in self._names), seen, -seen]
        found = self._team.largest(torch.tensor(flags, dtype=torch.int64)).tolist()
        if found[-2] != -found[-1]:
            raise RankMismatchError(
                "the ranks gathered and reduced their chunks in different orders",
                "every rank must call the same modules in the same order",
            )
        return {name for name, flag in zip(self._names, found, strict=False) if flag}
