"""Experts inside a tensor-parallel group: every rank computes its own, and the sum is everybody's.

All ranks see all tokens (PPMoE §3.3). Dispatch is an index selection, the combine one
all-reduce of the output, and backward one of the gradient of the input. Both are cut in chunks
that travel behind the next chunk's experts, which the paper does not.

T tokens, of which S are this rank's own (all of them where ranks have no shards), K choices,
R pairs of this rank's experts, D model width, H hidden width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.layer import Activation
from moetune.runtime.account import Account
from moetune.runtime.activations import activate, hidden_room, hidden_shapes
from moetune.runtime.experts import multiply
from moetune.runtime.links import Transfer
from moetune.runtime.local_pairs import Cut, LocalPairs
from moetune.runtime.pipelined_experts import ExpertGrads, Kept
from moetune.runtime.recorder import Phase, Recorder
from moetune.runtime.row_weights import ChunkWeights
from moetune.runtime.scratch import Scratch
from moetune.runtime.shards import Sharing, all_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Summing:
    """What both phases of a step share."""

    sharing: Sharing
    pairs: LocalPairs
    activation: Activation
    recorder: Recorder
    scratch: Scratch

    @property
    def account(self) -> Account:
        """What counts the tensors that are no rooms of the scratch."""
        return self.scratch.account

    def rooms(
        self, phase: Phase, like_TD: torch.Tensor, pre_RH: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return rooms for one chunk."""
        cut: Cut = getattr(self.pairs, phase)
        names = ("rows", "results" if phase == "forward" else "grads")
        shapes = dict.fromkeys(names, (cut.most_rows, like_TD.shape[1]))
        shapes |= hidden_shapes(
            self.activation, cut.most_rows, pre_RH.shape[1], backward=phase == "backward"
        )
        return self.scratch.rooms(shapes, like_TD)

    def gather(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return (T, …) from what this rank has of it."""
        whole = self.sharing.gather(values, name)
        if not self.sharing.is_complete:
            self.account.add(whole)
        return whole

    def gather_tokens(self, phase: Phase, values_SD: torch.Tensor) -> torch.Tensor:
        """Return (T, D): what the phase's first chunk waits for."""
        if self.sharing.is_complete:
            return values_SD
        name = "the gathering of x" if phase == "forward" else "the gathering of the gradient"
        with self.recorder.exchange(phase, "gather", 0):
            return self.gather(values_SD, name)

    def run(
        self, phase: Phase, compute: Callable[[int, torch.Tensor], None], like_TD: torch.Tensor
    ) -> tuple[torch.Tensor, list[Transfer]]:
        """Compute chunk after chunk, and add up each over the ranks behind the next ones.

        Args:
            compute: (chunk, sums (T, D)) adds the chunk's rows to its tokens' sums.

        Returns:
            (S, D), and the transfers that fill it.
        """
        cut: Cut = getattr(self.pairs, phase)
        what = "the results" if phase == "forward" else "the gradient of x"
        sums_TD = self.account.empty(what, like_TD.shape, like_TD).zero_()
        own_SD = self.sharing.room(what, sums_TD, self.account)
        under_way: list[Transfer] = []
        for chunk in range(cut.degree):
            with self.recorder.compute(phase, "experts", chunk):
                compute(chunk, sums_TD)
            name = f"{phase} sum {chunk + 1} of {cut.degree}"
            transfer = self.sharing.add(cut.tokens[chunk], sums_TD, own_SD, name)
            self.recorder.transfer(phase, "sum", chunk, transfer)
            under_way.append(transfer)
        return own_SD, under_way


class SummedExperts(torch.autograd.Function):
    """y = Σₖ weights · expert(x), the experts' share of every rank added up.

    Kept for the backward: x, and the experts' pre-activations; rows are gathered from x again.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_SD: torch.Tensor,
        weights_SK: torch.Tensor,
        summing: Summing,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        w3: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (S, D); without shards it is equal on all ranks."""
        pairs, account, activation = summing.pairs, summing.account, summing.activation
        x_TD = summing.gather_tokens("forward", x_SD)
        weights_TK = summing.gather(weights_SK, "the gathering of weights")
        weights_R1 = weights_TK.reshape(-1)[pairs.pairs_R].to(x_TD.dtype).unsqueeze(1)
        shape = len(pairs.pairs_R), w1.shape[2]
        pre_RH = account.empty("the experts' pre-activations", shape, x_TD)
        gate_RH = None if w3 is None else account.empty("the experts' gates", shape, x_TD)
        account.add(weights_R1)
        rooms = summing.rooms("forward", x_TD, pre_RH)

        def compute(chunk: int, sums_TD: torch.Tensor) -> None:
            mine, blocks = pairs.forward.rows[chunk], pairs.forward.blocks[chunk]
            rows = _gather(x_TD, pairs.tokens_R[mine], rooms["rows"])
            pre, gate = multiply(rows, w1, blocks, pre_RH[mine], b1), None
            if w3 is not None and gate_RH is not None:
                gate = multiply(rows, w3, blocks, gate_RH[mine])
            hidden = activate(pre, gate, activation, hidden_room(pre, activation, rooms))
            results = multiply(hidden, w2, blocks, rooms["results"][: len(rows)], b2)
            sums_TD.index_add_(0, pairs.tokens_R[mine], results.mul_(weights_R1[mine]))

        y_SD, under_way = summing.run("forward", compute, x_TD)
        _wait(under_way)
        ctx.summing = summing
        ctx.save_for_backward(x_TD, weights_SK, weights_R1, pre_RH, gate_RH, w1, b1, w2, b2, w3)
        return y_SD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_SD: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and the weights, complete, and of the parameters."""
        summing: Summing = ctx.summing
        with summing.scratch.guard("a backward pass"):
            return _backward(summing, ctx.saved_tensors, grad_SD.contiguous())


def _backward(
    summing: Summing, saved: tuple[Any, ...], grad_SD: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    x_TD, weights_SK, weights_R1, pre_RH, gate_RH, *parameters = saved
    pairs, account = summing.pairs, summing.account
    grad_TD = summing.gather_tokens("backward", grad_SD)
    rooms = summing.rooms("backward", grad_TD, pre_RH)
    experts = ExpertGrads(parameters, summing.activation, pairs.backward.degree, rooms, account)
    grads_R1 = account.empty("the gradients of weights", weights_R1.shape, weights_R1)

    def compute(chunk: int, sums_TD: torch.Tensor) -> None:
        mine, blocks = pairs.backward.rows[chunk], pairs.backward.blocks[chunk]
        tokens = pairs.tokens_R[mine]
        rows = _gather(x_TD, tokens, rooms["rows"])
        grads = _gather(grad_TD, tokens, rooms["grads"])
        weights = ChunkWeights(weights_R1[mine], grads_R1[mine], parameters[3])
        gate = None if gate_RH is None else gate_RH[mine]
        kept = Kept(received_RD=rows, pre_RH=pre_RH[mine], gate_RH=gate)
        experts.run(grads, kept, blocks, grads, weights)
        sums_TD.index_add_(0, tokens, grads)

    grad_x_SD, under_way = summing.run("backward", compute, x_TD)
    grad_weights_TK = weights_SK.new_zeros((len(x_TD), weights_SK.shape[1]))
    grad_weights_TK.view(-1)[pairs.pairs_R] = grads_R1.squeeze(1).to(weights_SK.dtype)
    grad_weights_SK = summing.sharing.room("the gradients of weights", grad_weights_TK, account)
    everything = all_parts(summing.sharing.num_tokens)
    name = "backward sum of the weights' gradients"
    last = summing.sharing.add(everything, grad_weights_TK, grad_weights_SK, name)
    _wait([*under_way, last])
    return grad_x_SD, grad_weights_SK, None, *experts.totals()


def _gather(values_TD: torch.Tensor, tokens: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    return torch.index_select(values_TD, 0, tokens, out=room[: len(tokens)])


def _wait(under_way: list[Transfer]) -> None:
    for transfer in under_way:
        transfer.wait()
