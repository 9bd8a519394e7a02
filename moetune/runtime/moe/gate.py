"""Route tokens: choose each token's experts, with their weights and the balance loss.

This is a token's second step: after the ranks agree in `planned_layer`, and before the dispatch is
planned and `function` takes the tokens.

T tokens of this rank, E experts, K choices a token, D model width.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.runtime.moe.placement import cut, local_part
from moetune.runtime.moe.products import widened_mm
from moetune.runtime.moe.workspace import explain

_WIDENED_VALUES = MappingProxyType({"cpu": 2**15, "cuda": 2**24})
"""Values of two-byte tokens that the gate widens at once: few enough for a CPU's cache, and many
enough to keep a GPU's kernel launches few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The gate's decisions for one step.

    Args:
        x_TD: the tokens for the experts: x itself, through an autograd node in which the gate adds
            its gradient in place to the experts' gradient.
        kept_TK: False if a pair is over its expert's capacity; None without a capacity.
        aux_loss: balance loss of this rank's tokens, a scalar; None if the caller has the router.
    """

    x_TD: torch.Tensor
    weights_TK: torch.Tensor
    experts_TK: torch.Tensor
    kept_TK: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


def no_routing(x: torch.Tensor, dtype: torch.dtype, layer: LayerShape) -> Routing:
    """Return the routing of zero tokens, on the device of `x`."""
    return Routing(
        x_TD=x.new_empty((0, layer.d_model), dtype=dtype),
        weights_TK=x.new_empty((0, layer.top_k), dtype=dtype),
        experts_TK=x.new_empty((0, layer.top_k), dtype=torch.int64),
    )


class Gate(nn.Module):
    """The gate: top-k of softmax(x weightᵀ), in float32 (float64 if x is), also under autocast.

    A NaN in a token's logits makes that token's weights, and the balance loss, NaN; its
    choices stay valid and all other tokens are untouched, so that no rank's sizes break.

    Args:
        normalize_topk: divide the chosen probabilities by their sum; None does so if K > 1.
        capacity_factor: an expert takes at most ceil(factor · T·K / E) of this rank's pairs, with
            the largest weights, the first tokens if weights tie. Megatron-Core's default is the
            same (`moe_token_drop_policy` "probs"). None takes all.

    Raises:
        InputError: capacity_factor is not above 0.
    """

    def __init__(
        self,
        layer: LayerShape,
        *,
        normalize_topk: bool | None,
        capacity_factor: float | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if capacity_factor is not None and not capacity_factor > 0:
            raise InputError(f"capacity_factor must be above 0 or None, got {capacity_factor}")
        self.layer = layer
        self.normalize_topk = layer.top_k > 1 if normalize_topk is None else normalize_topk
        self.capacity_factor = capacity_factor
        shape = (layer.num_experts, layer.d_model)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def reset(self, seed: int) -> None:
        """Draw the weight uniformly within ±1/√d_model, the same on every rank."""
        generator, bound = torch.Generator().manual_seed(seed), self.layer.d_model**-0.5
        values = torch.empty(self.weight.shape, dtype=torch.float64, device="cpu")
        values.uniform_(-bound, bound, generator=generator)
        local, offsets = local_part(self.weight)
        local.copy_(cut(values, offsets, local.shape))

    def forward(self, x_TD: torch.Tensor) -> Routing:
        """Return the routing of the tokens."""
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE, passed_TD = self._logits(x_TD)
            probabilities_TE = torch.softmax(logits_TE, dim=-1)
            weights_TK, experts_TK = torch.topk(probabilities_TE, self.layer.top_k, dim=-1)
            if self.normalize_topk:
                weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
            return Routing(
                x_TD=passed_TD,
                weights_TK=weights_TK,
                experts_TK=experts_TK,
                kept_TK=self._keep_best(weights_TK.detach(), experts_TK),
                aux_loss=self._balance_loss(probabilities_TE, experts_TK),
            )

    def _logits(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (T, E), and x for the experts."""
        if torch.compiler.is_compiling():  # which adds gradients and widens values by itself
            dtype = _dtype_of_logits(x_TD)
            return nn.functional.linear(x_TD.to(dtype), self.weight.to(dtype)), x_TD
        made: tuple[torch.Tensor, torch.Tensor] = RouterLogits.apply(  # type: ignore[no-untyped-call]
            x_TD, self.weight
        )
        return made

    def _balance_loss(
        self, probabilities_TE: torch.Tensor, experts_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the scalar E · Σₑ fₑ·pₑ, with expert e's share fₑ and mean probability pₑ.

        Shares count the pairs before any is dropped.
        """
        num_experts, top_k = self.layer.num_experts, self.layer.top_k
        sum_E = probabilities_TE.sum(dim=0)
        counts_E = counts_of(experts_TK.reshape(-1), num_experts)
        num_tokens = (counts_E.sum() // top_k).clamp(min=1)
        share_E = counts_E.to(sum_E.dtype) / (num_tokens * top_k)
        return num_experts * (share_E * (sum_E / num_tokens)).sum()

    def _keep_best(self, weights_TK: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor | None:
        if self.capacity_factor is None:
            return None
        capacity = math.ceil(self.capacity_factor * experts_TK.numel() / self.layer.num_experts)
        # NaN would sort before all numbers, and take the place of another token's pair.
        weights = weights_TK.reshape(-1).nan_to_num(nan=-1.0)
        by_weight = torch.sort(weights, descending=True, stable=True).indices
        ranked = torch.sort(experts_TK.reshape(-1)[by_weight], stable=True)
        counts_E = counts_of(ranked.values, self.layer.num_experts)
        first_E = torch.cumsum(counts_E, 0) - counts_E
        places = torch.arange(len(by_weight), device=first_E.device) - first_E[ranked.values]
        places_TK = torch.empty_like(experts_TK)
        places_TK.view(-1)[by_weight[ranked.indices]] = places
        return places_TK < capacity


class RouterLogits(torch.autograd.Function):
    """The logits x weightᵀ, and x itself, passed on to the experts.

    This saves memory: the gate adds its gradient of x to the experts' gradient in place. autograd
    would sum both, each as large as x, into a third tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weight_ED: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (T, E), and x."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TD, weight_ED)
        return _logits(x_TD, weight_ED, _dtype_of_logits(x_TD)), x_TD.view_as(x_TD)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TE: torch.Tensor | None,
        grad_x_TD: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        x_TD, weight_ED = ctx.saved_tensors
        grad_ED = None
        if grad_TE is not None:
            kind = x_TD.device.type
            with explain("the gate's backward pass"), torch.autocast(kind, enabled=False):
                halves_T2E = _halves(grad_TE) if _has_wide_products(x_TD, weight_ED) else None
                if ctx.needs_input_grad[1]:
                    grad_ED = _grad_of_weight(grad_TE, halves_T2E, x_TD)
                if ctx.needs_input_grad[0]:
                    grad_x_TD = torch.zeros_like(x_TD) if grad_x_TD is None else grad_x_TD
                    _add_to(grad_x_TD, grad_TE, halves_T2E, weight_ED)
        return grad_x_TD, None if grad_ED is None else grad_ED.to(weight_ED.dtype)


def _dtype_of_logits(x_TD: torch.Tensor) -> torch.dtype:
    return torch.float64 if x_TD.dtype == torch.float64 else torch.float32


def _has_wide_products(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> bool:
    """Return whether the product needs no widened factors: a GPU's GEMM can widen the result."""
    return x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16


def _logits(x_TD: torch.Tensor, weight_ED: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x weightᵀ, whose products are not rounded."""
    if _has_wide_products(x_TD, weight_ED):
        return widened_mm(x_TD, weight_ED.T, dtype)
    logits_TE = x_TD.new_empty((len(x_TD), len(weight_ED)), dtype=dtype)
    transposed_DE = weight_ED.to(dtype).T
    for some in _blocks(x_TD, dtype):
        torch.mm(x_TD[some].to(dtype), transposed_DE, out=logits_TE[some])
    return logits_TE


def counts_of(experts_N: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how often each expert occurs; `bincount` would first look for the largest index."""
    counts_E = experts_N.new_zeros(num_experts)
    return counts_E.scatter_add_(0, experts_N, torch.ones_like(experts_N))


def _blocks(x_TD: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    """Return a single block of all tokens, or several blocks if the gate widens their values."""
    num_tokens, width = x_TD.shape
    values = _WIDENED_VALUES.get(x_TD.device.type, _WIDENED_VALUES["cuda"])
    step = max(1, num_tokens if x_TD.dtype == dtype else values // width)
    return [slice(low, low + step) for low in range(0, num_tokens, step)]


def _halves(grad_TE: torch.Tensor) -> torch.Tensor:
    """Split a float32 gradient into two bfloat16 halves (T, 2E), exact to 16 bits of mantissa."""
    high_TE = grad_TE.bfloat16()
    return torch.cat((high_TE, (grad_TE - high_TE).bfloat16()), dim=1)


def _grad_of_weight(
    grad_TE: torch.Tensor, halves_T2E: torch.Tensor | None, x_TD: torch.Tensor
) -> torch.Tensor:
    if halves_T2E is not None:
        both_2ED = widened_mm(halves_T2E.T, x_TD, grad_TE.dtype)
        return both_2ED.view(2, -1, x_TD.shape[1]).sum(0)
    grad_ED = grad_TE.new_zeros((grad_TE.shape[1], x_TD.shape[1]))
    for some in _blocks(x_TD, grad_TE.dtype):
        grad_ED.addmm_(grad_TE[some].T, x_TD[some].to(grad_TE.dtype))
    return grad_ED


def _add_to(
    grad_x_TD: torch.Tensor,
    grad_TE: torch.Tensor,
    halves_T2E: torch.Tensor | None,
    weight_ED: torch.Tensor,
) -> None:
    """Add the gate's gradient of x to `grad_x_TD`."""
    if halves_T2E is not None:
        grad_x_TD.addmm_(halves_T2E, torch.cat((weight_ED, weight_ED)))
        return
    weight_ED = weight_ED.to(grad_TE.dtype)
    if grad_x_TD.dtype == grad_TE.dtype:
        grad_x_TD.addmm_(grad_TE, weight_ED)
        return
    for some in _blocks(grad_x_TD, grad_TE.dtype):
        grad_x_TD[some] += grad_TE[some] @ weight_ED
