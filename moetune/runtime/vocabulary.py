"""Embedding, head and loss with the vocabulary cut over a tensor-parallel group (Megatron-LM §3).

All ranks see the same tokens. Each has some rows of the embedding and of the head, so that the
model's largest product is shared; the loss needs one small sum, and no rank has all logits.

B sequences, S tokens each, D model width, V tokens of the vocabulary, W of them on this rank.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moetune.runtime.links import Link
from moetune.runtime.tensor_parallel import copied, summed


class SharedEmbedding(nn.Module):
    """An embedding whose rows are cut over the ranks, as equal as whole rows can be."""

    def __init__(self, vocab_size: int, d_model: int, link: Link) -> None:
        super().__init__()
        self.link = link
        self.whole = vocab_size, d_model
        self.mine = share_of(vocab_size, link)
        self.weight = nn.Parameter(torch.empty(len(self.mine), d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the whole embedding as `nn.Embedding` does and keep this rank's rows."""
        whole = nn.Embedding(*self.whole, dtype=self.weight.dtype, device="cpu")
        with torch.no_grad():
            self.weight.copy_(whole.weight[self.mine.start : self.mine.stop])

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D), equal on all ranks."""
        if self.link.num_ranks == 1:
            return functional.embedding(tokens_BS, self.weight)
        local_BS, is_mine_BS = _local(tokens_BS, self.mine)
        x_BSD = functional.embedding(local_BS, self.weight) * is_mine_BS.unsqueeze(-1)
        return summed(x_BSD, self.link)


class SharedHead(nn.Module):
    """A linear layer to this rank's logits: (…, D) to (…, W)."""

    def __init__(self, d_model: int, vocab_size: int, link: Link) -> None:
        super().__init__()
        self.link = link
        self.whole = d_model, vocab_size
        self.mine = share_of(vocab_size, link)
        self.weight = nn.Parameter(torch.empty(len(self.mine), d_model))
        self.bias = nn.Parameter(torch.empty(len(self.mine)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the whole head as `nn.Linear` does and keep this rank's rows."""
        whole = nn.Linear(*self.whole, dtype=self.weight.dtype, device="cpu")
        mine = slice(self.mine.start, self.mine.stop)
        with torch.no_grad():
            self.weight.copy_(whole.weight[mine])
            self.bias.copy_(whole.bias[mine])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits."""
        return functional.linear(copied(x, self.link), self.weight, self.bias)


def shared_cross_entropy(
    logits_TW: torch.Tensor, wanted_T: torch.Tensor, *, vocab_size: int, link: Link
) -> torch.Tensor:
    """Return the mean cross-entropy in nats, equal on all ranks.

    Args:
        logits_TW: of this rank's part of the vocabulary.
        wanted_T: tokens of the whole vocabulary.
    """
    if link.num_ranks == 1:
        return functional.cross_entropy(logits_TW, wanted_T)
    mine = share_of(vocab_size, link)
    loss_T: torch.Tensor = _CrossEntropy.apply(logits_TW, wanted_T, mine, link)  # type: ignore[no-untyped-call]
    return loss_T.mean()


def share_of(vocab_size: int, link: Link) -> range:
    """Return the tokens whose rows are on this rank."""
    each, more = divmod(vocab_size, link.num_ranks)
    start = link.rank * each + min(link.rank, more)
    return range(start, start + each + (link.rank < more))


class _CrossEntropy(torch.autograd.Function):
    """−log softmax of the wanted token; each rank adds its part of the normaliser."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        logits_TW: torch.Tensor,
        wanted_T: torch.Tensor,
        mine: range,
        link: Link,
    ) -> torch.Tensor:
        local_T, is_mine_T = _local(wanted_T, mine)
        # One row for each rank's log of summed exponentials, one for the wanted logits.
        rows_RT = logits_TW.new_zeros(link.num_ranks + 1, len(wanted_T))
        rows_RT[link.rank] = logits_TW.logsumexp(-1)
        rows_RT[-1] = logits_TW.gather(1, local_T.unsqueeze(1)).squeeze(1) * is_mine_T
        link.add(rows_RT, "the sum of the loss").wait()
        norm_T = rows_RT[:-1].logsumexp(0)
        ctx.save_for_backward(logits_TW, norm_T, local_T, is_mine_T)
        return norm_T - rows_RT[-1]

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        logits_TW, norm_T, local_T, is_mine_T = ctx.saved_tensors
        grad_TW = (logits_TW - norm_T.unsqueeze(1)).exp_()
        wanted_T1 = is_mine_T.to(grad_TW.dtype).unsqueeze(1)
        grad_TW.scatter_add_(1, local_T.unsqueeze(1), -wanted_T1)
        return grad_TW.mul_(grad_T.unsqueeze(1)), None, None, None


def _local(tokens: torch.Tensor, mine: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens counted from this rank's first, 0 for others', and which are its own."""
    is_mine = (tokens >= mine.start) & (tokens < mine.stop)
    return torch.where(is_mine, tokens - mine.start, 0), is_mine
