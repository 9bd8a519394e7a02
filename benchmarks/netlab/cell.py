"""One measured case: a layer, its tokens, and the same weights and inputs for every variant."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moetune.domain.layer import LayerShape

# T tokens of a rank, D model, H hidden, E experts of the layer, L experts of this rank, K top-k

Step = Callable[[], torch.Tensor]
_SEED = 20240229


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A layer with `tokens` tokens on every rank, in float32."""

    layer: LayerShape
    tokens: int

    @property
    def local_experts(self) -> int:
        """Experts on one rank."""
        return self.layer.num_experts // dist.get_world_size()

    def inputs(self) -> torch.Tensor:
        """Return this rank's tokens (T, D); every rank has others."""
        generator = torch.Generator().manual_seed(_SEED + 1 + dist.get_rank())
        return torch.randn(self.tokens, self.layer.d_model, generator=generator)

    def output_gradient(self) -> torch.Tensor:
        """Return dL/dy (T, D) of this rank."""
        generator = torch.Generator().manual_seed(_SEED - 1 - dist.get_rank())
        return torch.randn(self.tokens, self.layer.d_model, generator=generator)

    def all_weights(self) -> dict[str, torch.Tensor]:
        """Return the layer's parameters, those of all experts, as `moetune.MoELayer` loads them.

        The gate's rows are orthonormal: random tokens choose every expert equally often.
        """
        layer = self.layer
        generator = torch.Generator().manual_seed(_SEED)
        shape = (layer.num_experts, layer.d_model, layer.d_hidden)
        b1_EH = torch.randn(layer.num_experts, layer.d_hidden, generator=generator)
        b2_ED = torch.randn(layer.num_experts, layer.d_model, generator=generator)
        gate_DE = torch.randn(layer.d_model, layer.num_experts, generator=generator)
        w1_EDH = torch.randn(shape, generator=generator) * layer.d_model**-0.5
        w2_EHD = torch.randn(shape, generator=generator).mT * layer.d_hidden**-0.5
        return {
            "gate.weight": torch.linalg.qr(gate_DE).Q.T.contiguous(),
            "experts.w1": w1_EDH,
            "experts.b1": b1_EH,
            "experts.w2": w2_EHD.contiguous(),
            "experts.b2": b2_ED,
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters: the gate and its own experts."""
        rank, local = dist.get_rank(), self.local_experts
        mine = slice(rank * local, (rank + 1) * local)
        return {
            name: value[mine].contiguous() if name.startswith("experts.") else value
            for name, value in self.all_weights().items()
        }

    def routed_rows(self) -> torch.Tensor:
        """Return the rows (P, E) that every rank has for every expert."""
        logits_TE = self.inputs() @ self.weights()["gate.weight"].T
        choices = logits_TE.topk(self.layer.top_k, dim=1).indices.flatten()
        counts_PE = torch.zeros(dist.get_world_size(), self.layer.num_experts, dtype=torch.int64)
        counts_PE[dist.get_rank()] = torch.bincount(choices, minlength=self.layer.num_experts)
        dist.all_reduce(counts_PE)
        return counts_PE

    def imbalance(self) -> float:
        """Return the busiest expert's rows over the mean, over all ranks' tokens."""
        counts_E = self.routed_rows().sum(0)
        return float(counts_E.max() / counts_E.double().mean())


def module_step(cell: Cell, module: torch.nn.Module) -> Step:
    """Return forward and backward of (y·dy).sum() with fresh gradients of input and weights."""
    x_TD = cell.inputs().requires_grad_()
    grad_TD = cell.output_gradient()

    def step() -> torch.Tensor:
        x_TD.grad = None
        module.zero_grad(set_to_none=True)
        y_TD: torch.Tensor = module(x_TD)
        y_TD.backward(grad_TD)
        return y_TD.detach()

    return step
