"""A torch optimizer over this rank's shards, one piece for every parameter."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from moetune.domain.errors import InputError, RankMismatchError
from moetune.runtime.chunked.early_steps import EarlySteps
from moetune.runtime.chunked.keeper import ChunkKeeper
from moetune.runtime.chunked.side_stream import SideStream
from moetune.runtime.chunked.stored import StoredChunk
from moetune.runtime.chunked.team import Team

_KINDS = (Adam, AdamW, SGD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A parameter's elements on this rank: a view of its chunk's master.

    Args:
        low, high: of its elements in the master.
        first: which of the parameter's elements is the first.
    """

    name: str
    chunk: StoredChunk
    values: nn.Parameter
    low: int
    high: int
    first: int


class ChunkedOptimizer(Optimizer):
    """Steps the shards as the given optimizer would step the whole model.

    Parameters that got no gradient on any rank since `zero_grad` are left alone, as
    `torch.optim` leaves those whose `grad` is None. A step is a collective: all ranks call it.
    Chunks are stepped while later ones are still on their way.

    Args:
        optimizer: fresh, over parameters of the model.
        team: the data-parallel ranks.
        leaving: where gradients go to the host.
        in_backward: chunks are stepped within the backward pass.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        keeper: ChunkKeeper,
        team: Team,
        leaving: SideStream,
        *,
        in_backward: bool,
    ) -> None:
        self._keeper, self._team, self._leaving = keeper, team, leaving
        self._names = sorted(keeper.parameters)
        self.pieces = pieces_of(keeper.chunks)
        self._pieces = {
            number: tuple(pieces)
            for number, pieces in groupby(self.pieces, key=lambda piece: piece.chunk.number)
        }
        by_name = {piece.name: piece for piece in self.pieces}
        names = {id(parameter): name for name, parameter in keeper.parameters.items()}
        groups: Any = [
            {
                **_settings(group),
                "params": [
                    by_name[names[id(each)]].values
                    for each in group["params"]
                    if names[id(each)] in by_name
                ],
            }
            for group in optimizer.param_groups
        ]
        self._inner: Optimizer = _KINDS[_KINDS.index(type(optimizer))](groups)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.param_groups, self.state = self._inner.param_groups, self._inner.state
        self._early = EarlySteps(self._step_chunk) if in_backward else None
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
        pieces = self._pieces.get(chunk.number, ())
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


def check_optimizer(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Check that an optimizer can step shards of this model.

    Raises:
        InputError: it is of another kind or another model, or has stepped before.
    """
    if type(optimizer) not in _KINDS:
        known = ", ".join(kind.__name__ for kind in _KINDS)
        raise InputError(
            f"{type(optimizer).__name__} cannot step shards of parameters", f"use one of {known}"
        )
    if optimizer.state:
        raise InputError(
            f"the optimizer has states of {len(optimizer.state)} parameters already",
            "shard the model before the first step",
        )
    known_ids = {id(parameter) for parameter in parameters.values()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known_ids:
                raise InputError(
                    f"parameter {place} of the optimizer's group {number}, of shape "
                    f"{tuple(parameter.shape)}, is not one of the model's {len(known_ids)}",
                    "build the optimizer on model.parameters()",
                )


def first_states(optimizer: ChunkedOptimizer, piece: Piece) -> dict[str, torch.Tensor]:
    """Return a piece's states; those before the first step, made now, where it made none."""
    state: dict[str, Any] = optimizer.state[piece.values]
    group = next(
        (
            group
            for group in optimizer.param_groups
            if any(each is piece.values for each in group["params"])
        ),
        None,
    )
    if not state and group is not None:
        keys = ["exp_avg", "exp_avg_sq"] if "betas" in group else ["momentum_buffer"]
        if "betas" in group:
            state["step"] = torch.zeros((), device=piece.values.device)
        elif not group["momentum"]:
            keys = []
        if group.get("amsgrad"):
            keys.append("max_exp_avg_sq")
        state.update({key: torch.zeros_like(piece.values.detach()) for key in keys})
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def state_copies(optimizer: Optimizer) -> int:
    """Return how many values the optimizer keeps for every parameter."""
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2 + any(group["amsgrad"] for group in optimizer.param_groups)


def pieces_of(chunks: Iterable[StoredChunk]) -> tuple[Piece, ...]:
    """Return this rank's part of every parameter that can be trained."""
    return tuple(_pieces(chunks))


def _pieces(chunks: Iterable[StoredChunk]) -> Iterable[Piece]:
    for chunk in chunks:
        if not chunk.chunk.group.is_trainable:
            continue
        for slot in chunk.chunk.slots:
            low, high = chunk.part_of(slot)
            if low < high:
                yield Piece(
                    name=slot.name,
                    chunk=chunk,
                    values=nn.Parameter(chunk.master[low - chunk.low : high - chunk.low]),
                    low=low - chunk.low,
                    high=high - chunk.low,
                    first=low - slot.offset,
                )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings: fused where the caller leaves the choice."""
    settings = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
    if settings.get("fused") is None and not settings.get("foreach"):
        settings["fused"] = not (settings.get("capturable") or settings.get("differentiable"))
    return settings
