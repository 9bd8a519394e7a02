"""Experts inside a tensor-parallel group: every rank computes its own, and the sum is everybody's.

All ranks see all tokens (PPMoE §3.3). Dispatch is an index selection, the combine one
all-reduce of the output, and backward one of the gradient of the input. Both are cut in chunks
that travel behind the next chunk's experts, which the paper does not.

T tokens, K choices, R pairs of this rank's experts, D model width, H hidden width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.layer import Activation
from moetune.runtime.account import Account
from moetune.runtime.activations import activate, hidden_room, hidden_shapes
from moetune.runtime.experts import multiply
from moetune.runtime.links import Link, Transfer
from moetune.runtime.local_pairs import Cut, LocalPairs
from moetune.runtime.pipelined_experts import ExpertGrads, Kept
from moetune.runtime.recorder import Phase, Recorder
from moetune.runtime.row_weights import ChunkWeights
from moetune.runtime.scratch import Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class Summing:
    """What both phases of a step share."""

    link: Link
    pairs: LocalPairs
    activation: Activation
    recorder: Recorder
    scratch: Scratch

    @property
    def account(self) -> Account:
        """What counts the tensors that are no rooms of the scratch."""
        return self.scratch.account

    def rooms(
        self,
        cut: Cut,
        names: tuple[str, ...],
        like_TD: torch.Tensor,
        d_hidden: int,
        *,
        backward: bool,
    ) -> dict[str, torch.Tensor]:
        """Return rooms for one chunk: `names` of model width, and those of hidden width."""
        shapes = dict.fromkeys(names, (cut.most_rows, like_TD.shape[1]))
        shapes |= hidden_shapes(self.activation, cut.most_rows, d_hidden, backward=backward)
        return self.scratch.rooms(shapes, like_TD)

    def send(self, phase: Phase, chunk: int, sum_TD: torch.Tensor, cut: Cut) -> Transfer:
        """Start summing a chunk's tokens over the ranks, in place."""
        name = f"{phase} all-reduce {chunk + 1} of {cut.degree}"
        transfer = self.link.add(sum_TD[cut.tokens[chunk]], name)
        self.recorder.transfer(phase, "combine", chunk, transfer)
        return transfer


class SummedExperts(torch.autograd.Function):
    """y = Σₖ weights · expert(x), the experts' share of every rank added up.

    Kept for the backward: the pre-activations; rows are gathered from x again.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        summing: Summing,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        w3: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (T, D), equal on all ranks."""
        pairs, cut, account = summing.pairs, summing.pairs.forward, summing.account
        weights_R1 = weights_TK.reshape(-1)[pairs.pairs_R].to(x_TD.dtype).unsqueeze(1)
        shape = len(pairs.pairs_R), w1.shape[2]
        pre_RH = account.empty("the experts' pre-activations", shape, x_TD)
        gate_RH = None if w3 is None else account.empty("the experts' gates", shape, x_TD)
        rooms = summing.rooms(cut, ("rows", "results"), x_TD, w1.shape[2], backward=False)
        y_TD = account.empty("the results", x_TD.shape, x_TD).zero_()
        under_way: list[Transfer] = []
        for chunk in range(cut.degree):
            with summing.recorder.compute("forward", "experts", chunk):
                mine, blocks = cut.rows[chunk], cut.blocks[chunk]
                rows = _gather(x_TD, pairs.tokens_R[mine], rooms["rows"])
                pre, gate = pre_RH[mine], None
                multiply(rows, w1, blocks, pre, b1)
                if w3 is not None and gate_RH is not None:
                    gate = multiply(rows, w3, blocks, gate_RH[mine])
                hidden = activate(
                    pre, gate, summing.activation, hidden_room(pre, summing.activation, rooms)
                )
                results = multiply(hidden, w2, blocks, rooms["results"][: len(rows)], b2)
                y_TD.index_add_(0, pairs.tokens_R[mine], results.mul_(weights_R1[mine]))
            under_way.append(summing.send("forward", chunk, y_TD, cut))
        _wait(under_way)
        ctx.summing = summing
        ctx.save_for_backward(x_TD, weights_TK, weights_R1, pre_RH, gate_RH, w1, b1, w2, b2, w3)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TD: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and the weights, equal on all ranks, and of the parameters."""
        summing: Summing = ctx.summing
        with summing.scratch.guard("a backward pass"):
            return _backward(summing, ctx.saved_tensors, grad_TD.contiguous())


def _backward(
    summing: Summing, saved: tuple[Any, ...], grad_TD: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    x_TD, weights_TK, weights_R1, pre_RH, gate_RH, *parameters = saved
    pairs, cut, account = summing.pairs, summing.pairs.backward, summing.account
    rooms = summing.rooms(cut, ("rows", "grads"), grad_TD, pre_RH.shape[1], backward=True)
    experts = ExpertGrads(parameters, summing.activation, cut.degree, rooms, account)
    grad_weights_R1 = account.empty("gradients", weights_R1.shape, weights_R1)
    grad_x_TD = account.empty("the gradient of x", x_TD.shape, x_TD).zero_()
    under_way: list[Transfer] = []
    for chunk in range(cut.degree):
        with summing.recorder.compute("backward", "experts", chunk):
            mine, blocks = cut.rows[chunk], cut.blocks[chunk]
            tokens = pairs.tokens_R[mine]
            rows = _gather(x_TD, tokens, rooms["rows"])
            grads = _gather(grad_TD, tokens, rooms["grads"])
            kept = Kept(
                received_RD=rows,
                pre_RH=pre_RH[mine],
                gate_RH=None if gate_RH is None else gate_RH[mine],
            )
            weights = ChunkWeights(weights_R1[mine], grad_weights_R1[mine], parameters[3])
            experts.run(grads, kept, blocks, grads, weights)
            grad_x_TD.index_add_(0, tokens, grads)
        under_way.append(summing.send("backward", chunk, grad_x_TD, cut))
    grad_weights_TK = torch.zeros_like(weights_TK)
    grad_weights_TK.view(-1)[pairs.pairs_R] = grad_weights_R1.squeeze(1).to(weights_TK.dtype)
    under_way.append(summing.link.add(grad_weights_TK, "the sum of the weights' gradients"))
    _wait(under_way)
    return grad_x_TD, grad_weights_TK, None, *experts.totals()


def _gather(values_TD: torch.Tensor, tokens: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    return torch.index_select(values_TD, 0, tokens, out=room[: len(tokens)])


def _wait(under_way: list[Transfer]) -> None:
    for transfer in under_way:
        transfer.wait()
