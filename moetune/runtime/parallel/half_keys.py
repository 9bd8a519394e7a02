"""Attention of sequences whose first and last positions are two halves of a batch, in turns.

A token needs the keys and values of earlier tokens alone. The last positions take those of the
first ones, which go ahead of them; backward the first ones wait for the gradients of theirs.

B sequences, H heads, S tokens of both halves, s of one, K width of a head.
"""

from collections.abc import Hashable
from typing import Any

import torch

from moetune.domain.errors import InputError
from moetune.runtime.moe.turns import BatchTurn, current_turn

_KEYS, _GRADIENTS = "keys and values", "gradients of keys and values"
_KEYS_DIM = 2


def begin_backward_of_half() -> None:
    """Take note that this thread's half is through its forward pass.

    Raises:
        InputError: it has the last positions, and no attention took the first ones' keys.
    """
    turn = current_turn()
    if turn is None or turn.halves is None:
        return
    if turn.batch and turn.halves.split == "positions" and not turn.halves.has_told(0, _KEYS):
        raise InputError(
            "no attention of the last positions took keys and values of the first ones",
            "call moetune.with_first_half in it, give a model of transformers "
            'moetune.split_positions, or split the batch by "sequences"',
        )
    turn.halves.begin_backward(turn.batch)


def continues_first_half() -> bool:
    """Return whether this thread runs the last positions of sequences."""
    turn = _turn_of_positions()
    return turn is not None and turn.batch == 1


def with_first_half(
    attention: Hashable, key_BHsK: torch.Tensor, value_BHsK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values that this half's queries meet: (B, H, s or S, K).

    Args:
        attention: tells the model's attentions apart; the same for both halves.

    Raises:
        InputError: the first half has not passed this attention.
    """
    turn = _turn_of_positions()
    if turn is None:
        return key_BHsK, value_BHsK
    function = _Joined if turn.batch else _Told
    both: tuple[torch.Tensor, torch.Tensor] = function.apply(  # type: ignore[no-untyped-call]
        key_BHsK, value_BHsK, turn, attention
    )
    return both


def _turn_of_positions() -> BatchTurn | None:
    turn = current_turn()
    has_positions = (
        turn is not None and turn.halves is not None and turn.halves.split == "positions"
    )
    return turn if has_positions else None


def _keys_of_first(turn: BatchTurn, attention: Hashable) -> tuple[torch.Tensor, torch.Tensor]:
    found = turn.ask((_KEYS, attention))
    if found is None:
        raise InputError(
            "the last positions of a batch passed an attention that the first ones did not pass",
            "give both halves to the same model",
        )
    keys: tuple[torch.Tensor, torch.Tensor] = found  # type: ignore[assignment]
    return keys


class _Told(torch.autograd.Function):
    """The first half's keys and values, told to the other; backward, the sums of both gradients."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        key: torch.Tensor,
        value: torch.Tensor,
        turn: BatchTurn,
        attention: Hashable,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.turn, ctx.attention = turn, attention
        turn.tell((_KEYS, attention), (key.detach(), value.detach()))
        return key.view_as(key), value.view_as(value)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        turn: BatchTurn = ctx.turn
        others: tuple[torch.Tensor, torch.Tensor] | None = turn.ask((_GRADIENTS, ctx.attention))  # type: ignore[assignment]
        if turn.halves is not None:
            turn.halves.forget(0, (_KEYS, ctx.attention))
            turn.halves.forget(1, (_GRADIENTS, ctx.attention))
        if others is None:  # the other half's loss does not depend on them
            return grad_key, grad_value, None, None
        other_key, other_value = others
        return grad_key + other_key, grad_value + other_value, None, None


class _Joined(torch.autograd.Function):
    """Keys and values of both halves; backward, the first half's gradients are told to it."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        key: torch.Tensor,
        value: torch.Tensor,
        turn: BatchTurn,
        attention: Hashable,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first_key, first_value = _keys_of_first(turn, attention)
        ctx.turn, ctx.attention, ctx.cut = turn, attention, first_key.shape[_KEYS_DIM]
        return (
            torch.cat((first_key, key), _KEYS_DIM), torch.cat((first_value, value), _KEYS_DIM)
        )  # fmt: skip

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        parts = [grad.tensor_split((ctx.cut,), _KEYS_DIM) for grad in (grad_key, grad_value)]
        turn: BatchTurn = ctx.turn
        turn.tell((_GRADIENTS, ctx.attention), tuple(first for first, _ in parts))
        (_, key), (_, value) = parts
        return key, value, None, None
