"""The gate: which experts a token goes to, with which weight, and the balance loss.

T tokens of this rank, E experts, K choices a token, D model width.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from moetune.domain.layer import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What the gate decided for this step.

    Args:
        x_TD: the tokens for the experts: through them the gate adds its gradient in place.
        kept_TK: False where a pair is over the capacity; None where all are kept.
        aux_loss: E · Σₑ fₑ·pₑ over this rank's tokens, before any drop.
    """

    x_TD: torch.Tensor
    weights_TK: torch.Tensor
    experts_TK: torch.Tensor
    kept_TK: torch.Tensor | None
    aux_loss: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What stays in memory for the backward pass, each of a storage of its own."""
        return self.weights_TK, self.experts_TK


class _Logits(torch.autograd.Function):
    """x weightᵀ, and x itself for what comes after the gate.

    Autograd would sum the gradients of gate and experts from two tensors of the size of x into
    a third; here the gate adds to that of the experts.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weight_ED: torch.Tensor,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (T, E) in `dtype`, and x."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TD, weight_ED)
        return x_TD.to(dtype) @ weight_ED.to(dtype).T, x_TD.view_as(x_TD)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TE: torch.Tensor | None,
        grad_x_TD: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        """Return the gradients of x and of the weight."""
        x_TD, weight_ED = ctx.saved_tensors
        if grad_TE is None:
            return grad_x_TD, None, None
        grad_weight_ED = None
        with torch.autocast(x_TD.device.type, enabled=False):
            if ctx.needs_input_grad[1]:
                grad_weight_ED = (grad_TE.T @ x_TD.to(grad_TE.dtype)).to(weight_ED.dtype)
            if ctx.needs_input_grad[0]:
                weight_ED = weight_ED.to(grad_TE.dtype)
                if grad_x_TD is None:
                    grad_x_TD = (grad_TE @ weight_ED).to(x_TD.dtype)
                elif grad_x_TD.dtype == grad_TE.dtype:
                    grad_x_TD.addmm_(grad_TE, weight_ED)
                else:
                    grad_x_TD.add_(grad_TE @ weight_ED)
        return grad_x_TD, grad_weight_ED, None


class Gate(nn.Module):
    """softmax(x weightᵀ), top-k, in float32 (float64 if x is), also under autocast.

    A NaN in a token's logits makes that token's weights, and the balance loss, NaN; its
    choices stay valid and all other tokens are untouched, so that no rank's sizes break.

    Args:
        normalize_topk: divide the chosen probabilities by their sum.
        capacity_factor: an expert takes at most ceil(factor · T·K / E) of this rank's pairs,
            first choices before second ones, in the order of the tokens; None takes all.
    """

    def __init__(
        self,
        layer: LayerShape,
        *,
        normalize_topk: bool,
        capacity_factor: float | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.normalize_topk = normalize_topk
        self.capacity_factor = capacity_factor
        shape = (layer.num_experts, layer.d_model)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def forward(self, x_TD: torch.Tensor) -> Routing:
        """Return the routing of the tokens."""
        dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE, passed_TD = _Logits.apply(x_TD, self.weight, dtype)  # type: ignore[no-untyped-call]
            probabilities_TE = torch.softmax(logits_TE, dim=-1)
            weights_TK, experts_TK = torch.topk(probabilities_TE, self.layer.top_k, dim=-1)
            if self.normalize_topk:
                weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
            return Routing(
                x_TD=passed_TD,
                weights_TK=weights_TK,
                experts_TK=experts_TK,
                kept_TK=self._kept(experts_TK),
                aux_loss=self._aux_loss(probabilities_TE, experts_TK),
            )

    def _kept(self, experts_TK: torch.Tensor) -> torch.Tensor | None:
        if self.capacity_factor is None:
            return None
        num_tokens, top_k = experts_TK.shape
        capacity = math.ceil(self.capacity_factor * num_tokens * top_k / self.layer.num_experts)
        by_choice = experts_TK.T.reshape(-1)
        ranked = torch.sort(by_choice, stable=True)
        counts = torch.bincount(by_choice, minlength=self.layer.num_experts)
        first = torch.cumsum(counts, 0) - counts
        place = torch.arange(len(by_choice), device=first.device) - first[ranked.values]
        kept = torch.empty_like(by_choice, dtype=torch.bool)
        kept[ranked.indices] = place < capacity
        return kept.view(top_k, num_tokens).T

    def _aux_loss(self, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
        if not len(experts_TK):
            return probabilities_TE.sum()
        num_experts = self.layer.num_experts
        counts = torch.bincount(experts_TK.reshape(-1), minlength=num_experts)
        share_E = counts.to(probabilities_TE.dtype) / experts_TK.numel()
        return num_experts * (share_E * probabilities_TE.mean(dim=0)).sum()
