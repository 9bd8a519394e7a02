"""Models with every habit that chunks must live with."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moetune.runtime.moe.layer import ExpertLayer

WIDTH, VOCABULARY = 8, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return y


class Plain(nn.Module):
    """Embedding, blocks, head: takes token numbers (batch, length).

    Args:
        adds_in_place: to a module's output, which may be a view.
    """

    def __init__(self, *, adds_in_place: bool = False) -> None:
        super().__init__()
        self.adds_in_place = adds_in_place
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        if self.adds_in_place:
            logits += 1  # which the softmax of the loss does not see
        return logits


class Tied(Plain):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Borrowing(Plain):
    """The model's own forward uses the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()  # type: ignore[assignment] # the model itself is the head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.linear(super().forward(tokens), self.embedding.weight)


class Twice(Plain):
    """Blocks are called twice; the model has parameters of its own, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(WIDTH))
        self.idle = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.scale
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Backwards(Plain):
    """Modules are registered in the reverse order of their use, an idle one first."""

    def __init__(self) -> None:
        super().__init__()
        order = [nn.Linear(WIDTH, WIDTH), self.head, *reversed(self.blocks), self.embedding]
        del self.embedding, self.blocks, self.head
        self.parts = nn.ModuleList(order)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = tokens
        for part in reversed(self.parts[1:]):
            x = part(x)
        return x


class Frozen(Plain):
    """Every second block is frozen, and so is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.embedding, self.blocks[1], self.blocks[3].up):
            module.requires_grad_(False)  # noqa: FBT003 - torch's signature


class Checkpointed(Plain):
    """Blocks are computed again in the backward pass."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for low in (0, 2):
            run = nn.Sequential(*self.blocks[low : low + 2])
            x = checkpoint(run, x, use_reentrant=self.use_reentrant)
        logits: torch.Tensor = self.head(x)
        return logits


class Attentive(Plain):
    """Attention of torch, and outputs in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Sparse(Plain):
    """Blocks around layers of experts; the balance loss goes into the output."""

    def __init__(self, make_layer: Callable[[], ExpertLayer]) -> None:
        super().__init__()
        self.blocks = self.blocks[:2]
        self.layers = nn.ModuleList(make_layer() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block, layer in zip(self.blocks, self.layers, strict=True):
            x = block(x)
            assert isinstance(layer, ExpertLayer)
            x = x + layer(x)
            x = x + layer.aux_loss * 0.01
        logits: torch.Tensor = self.head(x)
        return logits
