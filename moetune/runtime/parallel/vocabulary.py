"""Embedding, head and loss with a vocabulary that is cut over a tensor-parallel group.

The model's largest GEMM is shared, and no rank has all logits (Megatron-LM §3).

B sequences, S tokens each, D model width, V tokens of the vocabulary, W of them on this rank.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from moetune.comm.group import Communicator
from moetune.runtime.parallel.sequence import linear_of_shards, sums_to_shards
from moetune.runtime.parallel.tensor import (
    TensorParallelModule,
    linear_of_copies,
    reduce_from_ranks,
)


class VocabParallelEmbedding(TensorParallelModule):
    """An embedding with rows cut over the ranks, almost equally."""

    cut: ClassVar[Mapping[str, int]] = MappingProxyType({"weight": 0})

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        communicator: Communicator,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__((vocab_size, d_model), communicator, sequence_parallel=sequence_parallel)
        self.mine = vocab_range(vocab_size, communicator)
        self.weight = nn.Parameter(torch.empty(len(self.mine), d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the whole embedding as `nn.Embedding` does and keep this rank's rows."""
        whole = nn.Embedding(*self.whole, dtype=self.weight.dtype, device="cpu")
        with torch.no_grad():
            self.weight.copy_(whole.weight[self.mine.start : self.mine.stop])

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D), equal on all ranks, or this rank's shard of it.

        Raises:
            IndexError: a token outside the vocabulary, as `nn.Embedding`; on a GPU its assertion.
        """
        if self.communicator.num_ranks == 1:
            return functional.embedding(tokens_BS, self.weight)
        local_BS, is_mine_BS = _local(tokens_BS, self.mine, self.whole[0])
        x_BSD = functional.embedding(local_BS, self.weight)
        x_BSD = x_BSD.masked_fill_(~is_mine_BS.unsqueeze(-1), 0)
        add = sums_to_shards if self.sequence_parallel else reduce_from_ranks
        return add(x_BSD, self.communicator)


class VocabParallelHead(TensorParallelModule):
    """A linear layer to this rank's logits: (…, D) to (…, W)."""

    def __init__(
        self,
        d_model: int,
        vocab_size: int,
        communicator: Communicator,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__((d_model, vocab_size), communicator, sequence_parallel=sequence_parallel)
        self.mine = vocab_range(vocab_size, communicator)
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
        linear = linear_of_shards if self.sequence_parallel else linear_of_copies
        return linear(x, self.weight, self.bias, self.communicator, self.weight_gradients)


def vocab_parallel_cross_entropy(
    logits_TW: torch.Tensor, wanted_T: torch.Tensor, *, vocab_size: int, communicator: Communicator
) -> torch.Tensor:
    """Return the mean cross-entropy in nats, equal on all ranks, in float32 or wider.

    Args:
        logits_TW: of this rank's part of the vocabulary.
        wanted_T: tokens of the whole vocabulary.

    Raises:
        RuntimeError: a token outside the vocabulary; on a GPU an assertion of the device.
    """
    local_T, is_mine_T = _local(wanted_T, vocab_range(vocab_size, communicator), vocab_size)
    loss_T: torch.Tensor = _CrossEntropy.apply(logits_TW, local_T, is_mine_T, communicator)  # type: ignore[no-untyped-call]
    return loss_T.mean()


def vocab_range(vocab_size: int, communicator: Communicator) -> range:
    """Return the tokens of the vocabulary whose rows are on this rank."""
    each, more = divmod(vocab_size, communicator.num_ranks)
    start = communicator.rank * each + min(communicator.rank, more)
    return range(start, start + each + (communicator.rank < more))


class _CrossEntropy(torch.autograd.Function):
    """−log softmax of the wanted token, from each rank's own softmax and its log-sum-exp.

    One pass of the fused kernel gives a rank's softmax in float32 or wider, the only large tensor
    that is saved. Its largest element is 1/Σ exp(x − max x), so that log Σ exp x = max x − log max
    softmax, without the passes and the copy that `logsumexp` takes.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        logits_TW: torch.Tensor,
        local_T: torch.Tensor,
        is_mine_T: torch.Tensor,
        communicator: Communicator,
    ) -> torch.Tensor:
        wide = torch.promote_types(logits_TW.dtype, torch.float32)
        softmax_TW = torch.softmax(logits_TW, -1, dtype=wide)
        own_T = logits_TW.amax(-1).to(wide) - softmax_TW.amax(-1).log()
        found_T = logits_TW.gather(1, local_T.unsqueeze(1)).squeeze(1).to(wide)
        # One row for every rank's log-sum-exp, one for the wanted logits.
        rows_RT = own_T.new_zeros(communicator.num_ranks + 1, len(local_T))
        rows_RT[communicator.rank] = own_T
        rows_RT[-1] = found_T.masked_fill(~is_mine_T, 0)
        communicator.all_reduce(rows_RT, "the sum of the loss").wait()
        whole_T = rows_RT[:-1].logsumexp(0)
        ctx.save_for_backward(softmax_TW, (own_T - whole_T).exp(), local_T, is_mine_T)
        ctx.dtype = logits_TW.dtype
        return whole_T - rows_RT[-1]

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        softmax_TW, part_T, local_T, is_mine_T = ctx.saved_tensors
        grad_TW = softmax_TW * (part_T * grad_T).unsqueeze(1)
        rows_T = torch.arange(len(local_T), device=local_T.device)
        grad_TW[rows_T, local_T] -= grad_T * is_mine_T
        return grad_TW.to(ctx.dtype), None, None, None


def _local(tokens: torch.Tensor, mine: range, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens as indices from this rank's first one, and which are its own.

    Other ranks' tokens become 0. Those outside the vocabulary remain out of range on all ranks,
    so that all of them raise when they look them up.
    """
    is_mine = (tokens >= mine.start) & (tokens < mine.stop)
    is_known = (tokens >= 0) & (tokens < vocab_size)
    return (tokens - mine.start).masked_fill_(is_known & ~is_mine, 0), is_mine
