"""The pipelined part: dispatch, experts and combine of all chunks, forward and backward.

One `torch.autograd.Function` with its own backward schedule, because the automatic backward
of chunked code does not overlap. T tokens, K choices, N kept rows of this rank, R rows
received, D model width, H hidden width, L local experts, C chunks.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.layer import Activation
from moetune.domain.plan import Order as IssueOrder
from moetune.runtime.activations import activate, activation_grad
from moetune.runtime.dispatch import Dispatch, Order
from moetune.runtime.experts import (
    Blocks,
    accumulate,
    accumulate_rows,
    add_bias,
    blocks_of,
    multiply,
)
from moetune.runtime.links import Link, Transfer
from moetune.runtime.recorder import Phase, Recorder
from moetune.runtime.regroup import Regroup
from moetune.runtime.schedule import issue_order

Compute = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """What a step's phases share."""

    link: Link
    dispatch: Dispatch
    issue_order: IssueOrder
    activation: Activation
    recorder: Recorder

    def run(self, phase: Phase, rows_ND: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Send every chunk's rows, compute on what arrives and bring the results back.

        Args:
            rows_ND: this rank's rows in the phase's sending order.
            compute: (chunk, rows received by expert (R_c, D)) -> (R_c, D); it runs while
                other chunks travel.

        Returns:
            The results in the order of `rows_ND`.

        Raises:
            CollectiveError: an exchange failed; the text names it and the chunk.
        """
        order: Order = getattr(self.dispatch, phase)
        results_ND = torch.empty_like(rows_ND)
        bounds = list(itertools.accumulate(map(sum, order.send_counts), initial=0))
        under_way: dict[int, tuple[Transfer, torch.Tensor]] = {}
        combines: list[Transfer] = []
        for step, chunk in issue_order(order.degree, self.issue_order):
            name = f"{phase} {step} {chunk + 1} of {order.degree}"
            sent, received = order.send_counts[chunk], order.receive_counts[chunk]
            mine = slice(bounds[chunk], bounds[chunk + 1])
            if step == "dispatch":
                arriving = rows_ND.new_empty(sum(received), rows_ND.shape[1])
                transfer = self.link.exchange(arriving, rows_ND[mine], received, sent, name)
                self.recorder.transfer(phase, step, chunk, transfer)
                under_way[chunk] = transfer, arriving
            elif step == "compute":
                transfer, arriving = under_way.pop(chunk)
                transfer.wait()
                regroup = Regroup(self.dispatch.counts_PCL, order.chunk_pieces[chunk : chunk + 2])
                with self.recorder.compute(phase, "experts", chunk):
                    computed = regroup.by_source(compute(chunk, regroup.by_expert(arriving)))
                under_way[chunk] = transfer, computed
            else:
                _, computed = under_way.pop(chunk)
                transfer = self.link.exchange(results_ND[mine], computed, sent, received, name)
                self.recorder.transfer(phase, step, chunk, transfer)
                combines.append(transfer)
        for transfer in combines:
            transfer.wait()
        return results_ND


class PipelinedExperts(torch.autograd.Function):
    """y = Σₖ weights · expert(x): rows leave, are computed and come back in chunks.

    Kept for the backward: what the experts received, their pre-activations, and the results
    that came back (for the gradient of the weights). The activation is computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        pipe: Pipe,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        w3: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (T, D)."""
        dispatch, top_k = pipe.dispatch, weights_TK.shape[1]
        order = dispatch.forward
        kept = any(ctx.needs_input_grad)
        slots = _Slots(dispatch, order)
        received_RD = x_TD.new_empty(dispatch.num_received, w1.shape[1]) if kept else None
        pre_RH = x_TD.new_empty(dispatch.num_received, w1.shape[2]) if kept else None
        gate_RH = torch.empty_like(pre_RH) if pre_RH is not None and w3 is not None else None

        def compute(chunk: int, rows: torch.Tensor) -> torch.Tensor:
            blocks, mine = slots.blocks[chunk], slots.rows[chunk]
            pre = multiply(rows, w1, blocks, None if pre_RH is None else pre_RH[mine])
            add_bias(pre, b1, blocks)
            gate = None
            if w3 is not None:
                gate = multiply(rows, w3, blocks, None if gate_RH is None else gate_RH[mine])
            if received_RD is not None:
                received_RD[mine] = rows
            hidden = activate(pre, gate, pipe.activation)
            return add_bias(multiply(hidden, w2, blocks), b2, blocks)

        rows_ND = x_TD.index_select(0, torch.div(order.pairs_N, top_k, rounding_mode="floor"))
        results_ND = pipe.run("forward", rows_ND, compute)
        ctx.pipe = pipe
        ctx.save_for_backward(
            weights_TK, results_ND, received_RD, pre_RH, gate_RH, w1, b1, w2, b2, w3
        )
        return _combine(results_ND, weights_TK, order)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TD: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, the weights and the parameters."""
        weights_TK, results_ND, received_RD, pre_RH, gate_RH, w1, b1, w2, b2, w3 = ctx.saved_tensors
        pipe: Pipe = ctx.pipe
        order, top_k = pipe.dispatch.backward, weights_TK.shape[1]
        slots = _Slots(pipe.dispatch, order)
        exact = _accumulation_dtype(w1.dtype, order.degree)
        totals = [
            None if each is None else torch.zeros_like(each, dtype=exact)
            for each in (w1, b1, w2, b2, w3)
        ]
        experts = _ExpertGrads(w1, w2, w3, totals, pipe.activation)

        def compute(chunk: int, grad: torch.Tensor) -> torch.Tensor:
            mine = slots.rows[chunk]
            gate = None if gate_RH is None else gate_RH[mine]
            return experts(grad, received_RD[mine], pre_RH[mine], gate, slots.blocks[chunk])

        grad_rows_ND = _spread(grad_TD, weights_TK, order)
        grad_weights_TK = None
        if ctx.needs_input_grad[1]:
            forward = pipe.dispatch.forward
            picked_TKD = _pick(results_ND, forward.row_of_pair, top_k)
            grad_weights_TK = torch.einsum("tkd,td->tk", picked_TKD, grad_TD)
        grad_x_ND = pipe.run("backward", grad_rows_ND, compute)
        grad_x_TD = _pick(grad_x_ND, order.row_of_pair, top_k).sum(dim=1)
        parameters = (None if total is None else total.to(w1.dtype) for total in totals)
        return grad_x_TD, grad_weights_TK, None, *parameters


class _Slots:
    """Where each chunk's rows lie in what is kept over the step: by piece, then expert."""

    def __init__(self, dispatch: Dispatch, order: Order) -> None:
        rows_CL = [
            dispatch.rows_CL[low:high] for low, high in itertools.pairwise(order.chunk_pieces)
        ]
        ends = itertools.accumulate((sum(map(sum, rows)) for rows in rows_CL), initial=0)
        self.rows = tuple(slice(low, high) for low, high in itertools.pairwise(ends))
        self.blocks: tuple[Blocks, ...] = tuple(map(blocks_of, rows_CL))


class _ExpertGrads:
    """The experts' backward of one chunk; parameter gradients add up over the chunks."""

    def __init__(
        self,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w3: torch.Tensor | None,
        totals: list[torch.Tensor | None],
        activation: Activation,
    ) -> None:
        self._w1, self._w2, self._w3 = w1, w2, w3
        self._totals = totals
        self._activation: Activation = activation

    def __call__(
        self,
        grad: torch.Tensor,
        rows: torch.Tensor,
        pre: torch.Tensor,
        gate: torch.Tensor | None,
        blocks: Blocks,
    ) -> torch.Tensor:
        grad_w1, grad_b1, grad_w2, grad_b2, grad_w3 = self._totals
        grad_hidden = multiply(grad, self._w2.transpose(1, 2), blocks)
        _add(grad_w2, activate(pre, gate, self._activation), grad, blocks)
        _add_rows(grad_b2, grad, blocks)
        if gate is None or self._w3 is None:
            grad_pre = activation_grad(grad_hidden, pre, self._activation)
            grad_rows = multiply(grad_pre, self._w1.transpose(1, 2), blocks)
        else:
            grad_gate = grad_hidden * activate(pre, None, "silu")
            grad_pre = activation_grad(grad_hidden.mul_(gate), pre, "silu")
            grad_rows = multiply(grad_pre, self._w1.transpose(1, 2), blocks)
            grad_rows += multiply(grad_gate, self._w3.transpose(1, 2), blocks)
            _add(grad_w3, rows, grad_gate, blocks)
        _add(grad_w1, rows, grad_pre, blocks)
        _add_rows(grad_b1, grad_pre, blocks)
        return grad_rows


def _add(total: torch.Tensor | None, x: torch.Tensor, y: torch.Tensor, blocks: Blocks) -> None:
    if total is not None:
        accumulate(total, x, y, blocks)


def _add_rows(total: torch.Tensor | None, y: torch.Tensor, blocks: Blocks) -> None:
    if total is not None:
        accumulate_rows(total, y, blocks)


def _accumulation_dtype(dtype: torch.dtype, degree: int) -> torch.dtype:
    """Sums over several chunks of two-byte numbers are kept in float32."""
    return torch.float32 if degree > 1 and dtype.itemsize < torch.float32.itemsize else dtype


def _combine(results_ND: torch.Tensor, weights_TK: torch.Tensor, order: Order) -> torch.Tensor:
    picked_TKD = _pick(results_ND, order.row_of_pair, weights_TK.shape[1])
    weights = weights_TK.to(results_ND.dtype)
    if weights.shape[1] == 1:
        return picked_TKD.squeeze(1).mul_(weights)
    return torch.bmm(weights.unsqueeze(1), picked_TKD).squeeze(1)


def _spread(grad_TD: torch.Tensor, weights_TK: torch.Tensor, order: Order) -> torch.Tensor:
    tokens_N = torch.div(order.pairs_N, weights_TK.shape[1], rounding_mode="floor")
    weights_N = weights_TK.reshape(-1).index_select(0, order.pairs_N).to(grad_TD.dtype)
    return grad_TD.index_select(0, tokens_N).mul_(weights_N.unsqueeze(1))


def _pick(rows_ND: torch.Tensor, row_of_pair: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return every pair's row (T, K, D), zeros for dropped pairs."""
    num_rows, width = rows_ND.shape
    shape = (len(row_of_pair) // top_k, top_k, width)
    if num_rows == len(row_of_pair):
        return rows_ND.index_select(0, row_of_pair).view(shape)
    if not num_rows:
        return rows_ND.new_zeros(shape)
    picked = rows_ND.index_select(0, row_of_pair.clamp(max=num_rows - 1))
    return picked.masked_fill_((row_of_pair == num_rows).unsqueeze(1), 0).view(shape)
