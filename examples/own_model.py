"""Train a decoder of one's own in the layout of a training plan.

    torchrun --nproc-per-node 2 -m examples.own_model model-plan.json

The plan is that of the guide's page "A whole model in a plan's layout" (docs/train-layouts.md).

The model knows nothing of ranks: `moetune.parallelize` cuts it into the plan's stages, spreads its
experts, and shards what the plan shards. Every layout prints the same losses but for rounding.

B sequences, S tokens each, D model width, V tokens of the vocabulary.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import moetune

VOCABULARY, WIDTH, HEADS, BLOCKS, EXPERTS = 256, 64, 4, 4, 4


class Block(nn.Module):
    """Causal attention and experts, each after a norm and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = moetune.MoELayer(
            WIDTH, 2 * WIDTH, EXPERTS, top_k=2, activation="swiglu",
            communicator=moetune.OneRank(),  # all experts here, until they are spread
        )  # fmt: skip

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        heads = self.qkv(self.norm1(x_BSD)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BSD = x_BSD + self.out(mixed.transpose(1, 2).flatten(2))
        result: torch.Tensor = x_BSD + self.moe(self.norm2(x_BSD))
        return result


class Decoder(nn.Module):
    """Next-token model of bytes."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, S, V) of the next tokens."""
        places = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x = self.tokens(tokens_BS) + self.places(places)
        for block in self.blocks:
            x = block(x)
        logits_BSV: torch.Tensor = self.head(self.norm(x))
        return logits_BSV


def loss_of(logits_BSV: torch.Tensor, wanted_BS: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats."""
    return functional.cross_entropy(logits_BSV.flatten(0, 1), wanted_BS.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plan", help="file of the training plan, or its id")
    parser.add_argument("--steps", type=int, default=5, help="default: 5")
    parser.add_argument("--batch", type=int, default=8, help="of the plan; default: 8")
    parser.add_argument("--length", type=int, default=32, help="of the plan; default: 32")
    arguments = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    torch.manual_seed(0)
    trained = moetune.parallelize(
        Decoder(arguments.length), arguments.plan, loss_of=loss_of, balance=0.01
    )
    optimizer = trained.optimizer(lambda parts: torch.optim.AdamW(parts, lr=3e-3))
    generator = torch.Generator().manual_seed(0)
    size = arguments.batch, arguments.length + 1
    for step in range(arguments.steps):
        text_BS = torch.randint(VOCABULARY, size, generator=generator) // 16 * 16
        text_BS = trained.local_batch(text_BS).to(trained.ranks.mesh.device_type)
        share = trained.backward(text_BS[:, :-1], text_BS[:, 1:])
        trained.clip_grad_norm_(1.0)
        optimizer.step()
        loss = float(trained.total_loss(share))
        if dist.get_rank() == 0:
            print(f"step {step + 1}: {loss:.4f} nats per token", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
