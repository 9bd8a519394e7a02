"""The pipelined part as one autograd function with its own backward schedule.

The automatic backward of chunked code does not overlap. T tokens, K choices, N rows this rank
sends, R rows it receives, D model width, H hidden width.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.layer import Activation
from moetune.runtime.moe.dispatch import Dispatch, Order
from moetune.runtime.moe.executor import PipelineContext, slices_of
from moetune.runtime.moe.experts import (
    Blocks,
    GradientSum,
    activate,
    activation_grad_,
    blocks_of,
    hidden_room,
    hidden_shapes,
    multiply,
    reactivate,
)
from moetune.runtime.moe.weights import ChunkWeights
from moetune.runtime.moe.workspace import MemoryTracker


class PipelinedExperts(torch.autograd.Function):
    """y = Σₖ weights · expert(x): rows leave, are computed and come back in chunks.

    Saved for the backward: what the experts received, their pre-activations, and the results
    that came back, by token (for the gradient of the weights). The activation is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        pipe: PipelineContext,
        activation: Activation,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        w3: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (T, D)."""
        order, account, (_, width, d_hidden) = pipe.dispatch.forward, pipe.account, w1.shape
        slots = ChunkLayout(pipe.dispatch, order)
        shapes = pipe.shapes("forward", width, in_place=False)
        shapes |= hidden_shapes(activation, slots.most_rows, d_hidden, backward=False)
        rooms = pipe.scratch.rooms(shapes, x_TD)
        kept = SavedActivations.room(pipe, x_TD, w1, w3)

        def compute(chunk: int, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            blocks, mine = slots.blocks[chunk], slots.rows[chunk]
            pre, gate = kept.pre_RH[mine], None
            multiply(rows, w1, blocks, pre, b1)
            if w3 is not None and kept.gate_RH is not None:
                gate = multiply(rows, w3, blocks, kept.gate_RH[mine])
            hidden = activate(pre, gate, activation, hidden_room(pre, activation, rooms))
            return multiply(hidden, w2, blocks, out, b2)

        top_k = weights_TK.shape[1]
        rows_ND = _gather(x_TD, order, top_k, rooms["rows"])
        pipe.run("forward", rows_ND, kept.received_RD, compute, rooms)
        picked_TKD = _pick(rows_ND, order, top_k)
        y_TD = _weighted_sum(picked_TKD, weights_TK.to(x_TD.dtype))
        account.add(picked_TKD, y_TD)
        ctx.pipe, ctx.activation = pipe, activation
        ctx.save_for_backward(
            weights_TK, picked_TKD, kept.received_RD, kept.pre_RH, kept.gate_RH, w1, b1, w2, b2, w3
        )
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TD: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, the weights and the parameters."""
        pipe: PipelineContext = ctx.pipe
        with pipe.scratch.guard("a backward pass"):
            return _backward(ctx, grad_TD)


def _backward(
    ctx: Any,  # noqa: ANN401
    grad_TD: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    weights_TK, picked_TKD, received_RD, pre_RH, gate_RH, *parameters = ctx.saved_tensors
    kept = SavedActivations(received_RD=received_RD, pre_RH=pre_RH, gate_RH=gate_RH)
    pipe: PipelineContext = ctx.pipe
    order, top_k = pipe.dispatch.backward, weights_TK.shape[1]
    slots = ChunkLayout(pipe.dispatch, order)
    shapes = pipe.shapes("backward", grad_TD.shape[1], in_place=True)
    shapes |= hidden_shapes(ctx.activation, slots.most_rows, pre_RH.shape[1], backward=True)
    rooms = pipe.scratch.rooms(shapes, grad_TD)
    experts = ExpertGrads(parameters, ctx.activation, order.degree, rooms, pipe.account)

    def compute(chunk: int, grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return experts.run(grad, kept.part(slots.rows[chunk]), slots.blocks[chunk], out)

    grad_weights_TK = None
    if ctx.needs_input_grad[1]:
        products_TKD = rooms["rows"].view(picked_TKD.shape)
        torch.mul(picked_TKD, grad_TD.unsqueeze(1), out=products_TKD)
        grad_weights_TK = products_TKD.sum(dim=2)
    rows_ND = _gather(grad_TD, order, top_k, rooms["rows"])
    rows_ND *= _of_rows(weights_TK, order).to(grad_TD.dtype)
    pipe.run("backward", rows_ND, rooms["received"], compute, rooms)
    if top_k == 1:
        grad_x_TD = _pick(rows_ND, order, top_k).squeeze(1)
        pipe.account.add(grad_x_TD)
    else:
        grad_x_TD = pipe.account.empty("the gradient of x", grad_TD.shape, grad_TD).zero_()
        grad_x_TD.index_add_(0, order.pairs_N // top_k, rows_ND)
    return grad_x_TD, grad_weights_TK, None, None, *experts.totals()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """What the backward needs of the experts: by piece and expert, for any cut into chunks."""

    received_RD: torch.Tensor
    pre_RH: torch.Tensor
    gate_RH: torch.Tensor | None

    @classmethod
    def room(
        cls, pipe: PipelineContext, x_TD: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor | None
    ) -> "SavedActivations":
        """Return room for all rows of a step."""
        num_rows, (_, width, d_hidden) = pipe.dispatch.num_received, w1.shape

        def room(what: str, columns: int) -> torch.Tensor:
            return pipe.account.empty(f"the experts' {what}", (num_rows, columns), x_TD)

        return cls(
            received_RD=room("inputs", width),
            pre_RH=room("pre-activations", d_hidden),
            gate_RH=None if w3 is None else room("gates", d_hidden),
        )

    @classmethod
    def of(
        cls, received_RD: torch.Tensor, middle: Mapping[str, torch.Tensor]
    ) -> "SavedActivations":
        """Return one chunk's."""
        return cls(received_RD=received_RD, pre_RH=middle["pre"], gate_RH=middle.get("gate"))

    def part(self, mine: slice) -> "SavedActivations":
        """Return one chunk's."""
        return SavedActivations(
            received_RD=self.received_RD[mine],
            pre_RH=self.pre_RH[mine],
            gate_RH=None if self.gate_RH is None else self.gate_RH[mine],
        )


class ChunkLayout:
    """Where each chunk's rows lie in what is kept, and its experts' blocks."""

    def __init__(self, dispatch: Dispatch, order: Order) -> None:
        rows_CL = [
            dispatch.rows_CL[low:high] for low, high in itertools.pairwise(order.chunk_pieces)
        ]
        self.rows = slices_of(sum(map(sum, rows)) for rows in rows_CL)
        self.blocks: tuple[Blocks, ...] = tuple(map(blocks_of, rows_CL))
        self.most_rows = max(sum(map(sum, rows)) for rows in rows_CL)


class ExpertGrads:
    """The experts' backward, chunk by chunk; the parameters' gradients add up."""

    def __init__(
        self,
        parameters: list[Any],
        activation: Activation,
        degree: int,
        rooms: Mapping[str, torch.Tensor],
        account: MemoryTracker,
    ) -> None:
        w1, _, w2, _, w3 = parameters
        self._w1_T, self._w2_T = _transposed(w1), _transposed(w2)
        self._w3_T = None if w3 is None else _transposed(w3)
        self._activation: Activation = activation
        self._rooms = rooms
        self._sums = [
            None if each is None else GradientSum(each, degree, account) for each in parameters
        ]

    def run(
        self,
        grad: torch.Tensor,
        kept: SavedActivations,
        blocks: Blocks,
        out: torch.Tensor,
        weights: ChunkWeights | None = None,
        middle_is_free: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Return the gradient of the received rows in `out`, which may be `grad`.

        Args:
            grad: (R_c, D), of the experts' results; with weights of the weighted results.
            middle_is_free: called when the pre-activations have been read for the last time.
        """
        sum_w1, sum_b1, sum_w2, sum_b2, sum_w3 = self._sums
        pre, gate = kept.pre_RH, kept.gate_RH
        room = hidden_room(pre, self._activation, self._rooms)
        hidden = reactivate(pre, gate, self._activation, room)
        grad_hidden = multiply(grad, self._w2_T, blocks, self._rooms["grad hidden"][: len(pre)])
        if weights is not None:
            weights.apply(grad, hidden, grad_hidden, blocks)
        _add(sum_w2, hidden, grad, blocks)
        _add_rows(sum_b2, grad, blocks)
        if gate is not None and self._w3_T is not None:
            grad_gate = activate(pre, None, "silu", hidden).mul_(grad_hidden)
            grad_hidden.mul_(gate)
            _add(sum_w3, kept.received_RD, grad_gate, blocks)
            multiply(grad_gate, self._w3_T, blocks, out)
        grad_pre = activation_grad_(grad_hidden, pre, self._activation)
        middle_is_free()
        _add(sum_w1, kept.received_RD, grad_pre, blocks)
        _add_rows(sum_b1, grad_pre, blocks)
        return multiply(grad_pre, self._w1_T, blocks, out, adds=gate is not None)

    def totals(self) -> tuple[torch.Tensor | None, ...]:
        """Return the parameters' gradients, once: each sum ends where its gradient is made."""
        self._sums.reverse()
        sums = (self._sums.pop() for _ in range(len(self._sums)))
        return tuple(None if each is None else each.total() for each in sums)


def _transposed(w: torch.Tensor) -> torch.Tensor:
    return w.transpose(1, 2)


def _add(into: GradientSum | None, x: torch.Tensor, y: torch.Tensor, blocks: Blocks) -> None:
    if into is not None:
        into.add_products(x, y, blocks)


def _add_rows(into: GradientSum | None, y: torch.Tensor, blocks: Blocks) -> None:
    if into is not None:
        into.add_rows(y, blocks)


def _weighted_sum(picked_TKD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    y_TD = picked_TKD[:, 0] * weights_TK[:, :1]
    for choice in range(1, weights_TK.shape[1]):
        y_TD.addcmul_(picked_TKD[:, choice], weights_TK[:, choice, None])
    return y_TD


def _gather(x_TD: torch.Tensor, order: Order, top_k: int, room: torch.Tensor) -> torch.Tensor:
    """Return the tokens' rows in sending order."""
    tokens_N = order.pairs_N if top_k == 1 else order.pairs_N // top_k
    return torch.index_select(x_TD, 0, tokens_N, out=room[: len(tokens_N)])


def _of_rows(weights_TK: torch.Tensor, order: Order) -> torch.Tensor:
    return weights_TK.reshape(-1).index_select(0, order.pairs_N).unsqueeze(1)


def _pick(rows_ND: torch.Tensor, order: Order, top_k: int) -> torch.Tensor:
    """Return every pair's row (T, K, D), zeros for dropped pairs."""
    num_rows, width = rows_ND.shape
    shape = (order.num_pairs // top_k, top_k, width)
    if not num_rows:
        return rows_ND.new_zeros(shape)
    row_of_pair = order.row_of_pair()
    if num_rows == order.num_pairs:
        return rows_ND.index_select(0, row_of_pair).view(shape)
    picked = rows_ND.index_select(0, row_of_pair.clamp(max=num_rows - 1))
    return picked.masked_fill_((row_of_pair == num_rows).unsqueeze(1), 0).view(shape)
