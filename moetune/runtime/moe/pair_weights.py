"""Combine weights where the experts apply them: behind the activation, before the down-projection.

Each pair's weight travels to its expert once a step, and its gradient back. Results then need no
weight at the tokens: they are summed as they come, and none is saved for the backward pass.

T tokens, K choices, N rows this rank sends, R rows it receives, H hidden width, E local experts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetune.comm.group import Communicator
from moetune.comm.transfer import Done, Transfer
from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.pairs import dots, pick
from moetune.runtime.moe.products import RowPart


@dataclass(frozen=True, slots=True, kw_only=True)
class CombineWeights:
    """The combine weights of some rows at their experts, and memory for their gradients.

    Args:
        values_R1, grads_R1: (R, 1).
    """

    values_R1: torch.Tensor
    grads_R1: torch.Tensor

    def of(self, rows: slice) -> "CombineWeights":
        """Return those of some rows."""
        return CombineWeights(values_R1=self.values_R1[rows], grads_R1=self.grads_R1[rows])

    def write_grads(
        self,
        grad_RD: torch.Tensor,
        hidden_RH: torch.Tensor,
        grad_hidden_RH: torch.Tensor,
        b2: torch.Tensor | None,
        part: RowPart,
    ) -> None:
        """Write ⟨dy, h·W₂ + b₂⟩, as ⟨dy·W₂ᵀ, h⟩ + ⟨dy, b₂⟩: the results are not needed for it.

        Args:
            grad_RD: dy of every row.
            grad_hidden_RH: dy·W₂ᵀ.
            b2: (E, D), None without biases.
        """
        dots(grad_hidden_RH.unsqueeze(1), hidden_RH, self.grads_R1)
        if b2 is None:
            return
        if part.experts_RE is not None:
            dots_RE = (grad_RD @ b2.T).mul_(part.experts_RE)
            self.grads_R1.add_(dots_RE.sum(dim=1, keepdim=True))
            return
        for expert, low, high in part.blocks:
            self.grads_R1[low:high] += grad_RD[low:high] @ b2[expert].unsqueeze(1)


class PairWeights:
    """The exchange of a step's combine weights, and of their gradients."""

    def __init__(self, dispatch: Dispatch, communicator: Communicator) -> None:
        self._dispatch, self._communicator = dispatch, communicator
        order = dispatch.forward
        self._chunk_counts = order.send_counts
        self._rank_counts = list(zip(*order.send_counts, strict=True))
        self._send = [sum(counts) for counts in self._rank_counts]
        self._receive = [sum(counts) for counts in zip(*order.receive_counts, strict=True)]
        self._places_R = dispatch.by_expert((0, order.chunk_pieces[-1]))
        self._travelling: torch.Tensor

    def send(self, weights_TK: torch.Tensor, name: str) -> Transfer:
        """Start sending the weights to the experts."""
        rows_N1 = self._dispatch.forward.weights_of_rows(weights_TK).unsqueeze(1)
        if self._communicator.num_ranks == 1:
            self._travelling = rows_N1
            return Done()
        rows_N1 = _transpose_blocks(rows_N1, self._chunk_counts)
        self._travelling = rows_N1.new_empty(sum(self._receive), 1)
        return self._communicator.all_to_all(
            self._travelling, rows_N1, self._receive, self._send, name
        )

    def arrived(self) -> torch.Tensor:
        """Return the weights that have arrived, (R, 1) by piece and expert."""
        if self._places_R is None:
            return self._travelling
        return self._travelling.index_select(0, self._places_R)

    def send_back(self, grads_R1: torch.Tensor, name: str) -> Transfer:
        """Start sending the gradients of the weights, (R, 1) by piece and expert, back."""
        if self._communicator.num_ranks == 1:
            self._travelling = grads_R1
            return Done()
        if self._places_R is not None:
            grads_R1 = torch.empty_like(grads_R1).index_copy_(0, self._places_R, grads_R1)
        self._travelling = grads_R1.new_empty(sum(self._send), 1)
        return self._communicator.all_to_all(
            self._travelling, grads_R1, self._send, self._receive, name
        )

    def returned(self, like_TK: torch.Tensor) -> torch.Tensor:
        """Return the gradients that came back, shaped as `like_TK`, 0 for dropped pairs."""
        rows_N1, order = self._travelling, self._dispatch.forward
        if self._communicator.num_ranks > 1:
            rows_N1 = _transpose_blocks(rows_N1, self._rank_counts)
        return pick(rows_N1, order.rows_TK, drops=order.drops).squeeze(2).to(like_TK.dtype)


def _transpose_blocks(rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the blocks [i][j] of `rows` in the order [j][i]."""
    if len(counts) == 1 or len(counts[0]) == 1:
        return rows
    blocks = iter(torch.split(rows, list(itertools.chain.from_iterable(counts))))
    grid = [[next(blocks) for _ in line] for line in counts]
    return torch.cat([block for column in zip(*grid, strict=True) for block in column])
