"""This rank's part of every parameter, as the optimizer steps it, and the states of each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from moetune.runtime.chunked.stored import StoredChunk


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


def pieces_of(chunks: Iterable[StoredChunk]) -> tuple[Piece, ...]:
    """Return this rank's part of every parameter that can be trained."""
    return tuple(_pieces(chunks))


def _pieces(chunks: Iterable[StoredChunk]) -> Iterator[Piece]:
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


def first_states(optimizer: Optimizer, piece: Piece) -> dict[str, torch.Tensor]:
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
