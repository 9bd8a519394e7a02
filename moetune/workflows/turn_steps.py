"""Blocks of a model on a rank of which two batches take turns, for a profile.

B sequences, S tokens each, T = B·S, D model width, E experts.
"""

from dataclasses import replace

import torch
from torch import nn

from moetune.comm.group import Communicator, OneRank
from moetune.domain.model import Transformer
from moetune.domain.plan import SAFE_DECISION
from moetune.domain.samples import TurnsPoint
from moetune.domain.training import BATCHES_IN_TURNS, BatchSplit
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.block import Attention, FeedForward, TransformerBlock
from moetune.runtime.parallel.overlap import BatchOverlap

_SEED = 20240229
_NUM_DRAWS = 32
_Batch = tuple[torch.Tensor, torch.Tensor]
"""Tokens and the gradient of the output, each (B, S, D)."""


class BlocksInTurns:
    """Blocks with random weights, and two batches of random tokens that choose all experts alike.

    Args:
        communicator: of the ranks that share the experts.
    """

    def __init__(
        self, point: TurnsPoint, *, device: torch.device, communicator: Communicator
    ) -> None:
        torch.manual_seed(_SEED)
        dtype = getattr(torch, point.dtype)
        numbers = range(point.model.num_layers)
        self.blocks = nn.Sequential(
            *(_block(point.model, number, communicator) for number in numbers)
        ).to(device, dtype)
        generator = torch.Generator().manual_seed(_SEED + 1 + communicator.rank)
        self.batches = _batches(point, generator, device, dtype)
        decision = replace(SAFE_DECISION, forward_degree=point.degree, backward_degree=point.degree)
        for layer in _moe_layers(self.blocks):
            layer.pin(decision)
        inputs = [x_BSD.detach() for x_BSD, _ in self.batches]
        every_BSD = torch.cat(inputs, dim=0 if point.split == "sequences" else 1)
        _balance(self.blocks, every_BSD, communicator)
        # Halves of whole sequences are batches of their own here, as two micro-batches are.
        split: BatchSplit | None = None if point.split == "sequences" else point.split
        self._overlap = BatchOverlap[_Batch](self.blocks, self.loss_of, split=split)

    def once(self) -> None:
        """Run both batches' forward and backward passes."""
        self.blocks.zero_grad(set_to_none=True)
        for x_BSD, _ in self.batches:
            x_BSD.grad = None
        self._overlap(self.batches)

    def loss_of(self, batch: _Batch) -> torch.Tensor:
        """Return the scalar whose gradient at the blocks' output is the batch's."""
        x_BSD, grad_BSD = batch
        loss: torch.Tensor = (self.blocks(x_BSD) * grad_BSD).sum()
        return loss


def _block(model: Transformer, number: int, communicator: Communicator) -> TransformerBlock:
    moe, width = model.moe, model.moe.d_model
    if model.has_experts(number):
        ffn: nn.Module = MoELayer(
            width, moe.d_hidden, moe.num_experts, moe.top_k, activation=moe.activation,
            communicator=communicator, memory_reuse=False,
        )  # fmt: skip
    else:
        ffn = FeedForward(width, moe.d_hidden, OneRank())
    return TransformerBlock(Attention(width, model.num_heads, OneRank()), ffn, width, balance=0.0)


def _moe_layers(blocks: nn.Sequential) -> list[MoELayer]:
    return [block.ffn for block in blocks if isinstance(block.ffn, MoELayer)]


def _batches(
    point: TurnsPoint, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> list[_Batch]:
    size = point.sequences, point.positions, point.model.moe.d_model
    return [
        (
            torch.randn(size, generator=generator).to(device, dtype).requires_grad_(),
            torch.randn(size, generator=generator).to(device, dtype),
        )
        for _ in range(BATCHES_IN_TURNS)
    ]


def _balance(blocks: nn.Sequential, x_BSD: torch.Tensor, communicator: Communicator) -> None:
    """Give each gate, of several random ones, the one whose busiest expert has the fewest rows."""
    generator = torch.Generator().manual_seed(_SEED)

    def choose(layer: MoELayer, inputs: tuple[torch.Tensor]) -> None:
        x_TD = inputs[0].flatten(0, -2)
        every_TD = x_TD.new_empty((communicator.num_ranks * len(x_TD), x_TD.shape[1]))
        communicator.all_gather(every_TD, x_TD.contiguous(), "the tokens of all ranks").wait()
        draws = [
            torch.randn(layer.gate.weight.shape, generator=generator).to(x_TD)
            for _ in range(_NUM_DRAWS)
        ]
        least = min(draws, key=lambda gate_ED: _most_rows(every_TD @ gate_ED.T, layer.shape.top_k))
        layer.gate.weight.copy_(least / least.shape[1] ** 0.5)

    hooks = [layer.register_forward_pre_hook(choose) for layer in _moe_layers(blocks)]
    with torch.no_grad():
        blocks(x_BSD)
    for hook in hooks:
        hook.remove()


def _most_rows(logits_TE: torch.Tensor, top_k: int) -> int:
    chosen = logits_TE.topk(top_k, dim=-1).indices.flatten()
    return int(torch.bincount(chosen, minlength=logits_TE.shape[1]).max())
