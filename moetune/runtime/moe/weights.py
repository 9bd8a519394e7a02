"""The combine weights of rows, where the experts apply them.

With reused memory the results that came back are not kept, and the gradient of a weight needs
them: ∂L/∂w = ⟨dy, o⟩. The experts know it without o, as ⟨dy·W₂ᵀ, h⟩ + ⟨dy, b₂⟩. So weights
travel to the experts once a step, and their gradients back: N numbers each way.

N rows this rank sends, R rows it receives, T tokens, K choices.
"""

from types import MappingProxyType

import torch

from moetune.runtime.links import Link
from moetune.runtime.moe.dispatch import Dispatch, Regroup, transpose_blocks
from moetune.runtime.moe.experts import Blocks

_DOT_VALUES = MappingProxyType({"cpu": 2**15, "cuda": 2**22})
"""Products with hidden values that are in memory at once: few enough for a CPU's cache, and
enough for a GPU's launches."""


class ChunkWeights:
    """The weights of one chunk's rows, and where their gradients go.

    Args:
        weights_R1, grads_R1: (R_c, 1).
        b2: (L, D), None without biases.
    """

    def __init__(
        self, weights_R1: torch.Tensor, grads_R1: torch.Tensor, b2: torch.Tensor | None
    ) -> None:
        self._weights_R1, self._grads_R1, self._b2 = weights_R1, grads_R1, b2

    def apply(
        self,
        grad: torch.Tensor,
        hidden: torch.Tensor,
        grad_hidden: torch.Tensor,
        blocks: Blocks,
    ) -> None:
        """Write the weights' gradients, then weight both gradients in place.

        Args:
            grad: (R_c, D), dy of every row.
            grad_hidden: (R_c, H), dy·W₂ᵀ.
        """
        step = max(1, _DOT_VALUES[grad.device.type] // hidden.shape[1])
        for low in range(0, len(grad), step):
            some = slice(low, low + step)
            out = self._grads_R1[some]
            torch.sum(grad_hidden[some] * hidden[some], dim=1, keepdim=True, out=out)
        if self._b2 is not None:
            for expert, low, high in blocks:
                self._grads_R1[low:high] += grad[low:high] @ self._b2[expert].unsqueeze(1)
        grad.mul_(self._weights_R1)
        grad_hidden.mul_(self._weights_R1)


class RowWeights:
    """This step's exchange of one number for each row, all chunks together."""

    def __init__(self, dispatch: Dispatch, link: Link) -> None:
        self._dispatch, self._link = dispatch, link
        order = dispatch.forward
        self._chunk_counts = order.send_counts
        self._rank_counts = list(zip(*order.send_counts, strict=True))
        self._send = [sum(counts) for counts in self._rank_counts]
        self._receive = [sum(counts) for counts in zip(*order.receive_counts, strict=True)]
        self._regroup = Regroup(dispatch.counts_PCL, (0, order.chunk_pieces[-1]))

    def send(self, weights_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of the rows that this rank receives, (R, 1) by piece and expert."""
        rows_N1 = weights_TK.reshape(-1)[self._dispatch.forward.pairs_N].to(dtype).unsqueeze(1)
        rows_N1 = transpose_blocks(rows_N1, self._chunk_counts, torch.empty_like(rows_N1))
        arrived_R1 = rows_N1.new_empty(sum(self._receive), 1)
        self._exchange(arrived_R1, rows_N1, self._receive, self._send, "the exchange of weights")
        if self._regroup.changes_nothing:
            return arrived_R1
        return self._regroup.by_expert(arrived_R1, torch.empty_like(arrived_R1))

    def bring_back(self, grads_R1: torch.Tensor, like_TK: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the weights, 0 for dropped pairs, shaped as `like_TK`."""
        if not self._regroup.changes_nothing:
            grads_R1 = self._regroup.by_source(grads_R1, torch.empty_like(grads_R1))
        arrived_N1 = grads_R1.new_empty(sum(self._send), 1)
        name = "the exchange of the weights' gradients"
        self._exchange(arrived_N1, grads_R1, self._send, self._receive, name)
        rows_N1 = transpose_blocks(arrived_N1, self._rank_counts, torch.empty_like(arrived_N1))
        grads_TK = torch.zeros_like(like_TK)
        pairs_N = self._dispatch.forward.pairs_N
        grads_TK.view(-1)[pairs_N] = rows_N1.squeeze(1).to(like_TK.dtype)
        return grads_TK

    def _exchange(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        take: list[int],
        give: list[int],
        name: str,
    ) -> None:
        self._link.exchange(output, rows, take, give, name, is_alone=True).wait()
