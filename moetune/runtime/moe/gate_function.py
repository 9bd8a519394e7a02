"""The gate's mathematics as one function of autograd: probabilities, choices, and gradients.

T tokens of this rank, E experts, K choices a token, D model width.
"""

from types import MappingProxyType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.comm.group import Communicator
from moetune.runtime.delayed import WeightGradients, add_gradient
from moetune.runtime.moe.products import widened_mm
from moetune.runtime.moe.workspace import MemoryTracker

_WIDENED_VALUES = MappingProxyType({"cpu": 2**15, "cuda": 2**24})
"""Values of two-byte tokens that the gate widens at once: few enough for a CPU's cache, and many
enough to keep a GPU's kernel launches few."""


class GateFunction(torch.autograd.Function):
    """softmax(x weightᵀ), its K largest and its mean; and x, passed on to the experts.

    One function saves memory: from separate operations autograd would sum the gradients of gate
    and experts, each as large as x, into a third tensor, and hold up to four tensors of (T, E).
    Here the gate adds its gradient to that of the experts, and holds two.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weight_ED: torch.Tensor,
        top_k: int,
        normalize: bool,
        tracker: MemoryTracker,
        communicator: Communicator | None,
        delayed: WeightGradients | None,
    ) -> tuple[torch.Tensor, ...]:
        """Return weights and experts (T, K), mean probabilities and shares of pairs (E,), and x."""
        dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        probabilities_TE = torch.softmax(_logits(x_TD, weight_ED, dtype), dim=-1)
        weights_TK, experts_TK = torch.topk(probabilities_TE, top_k, dim=-1)
        if normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        mean_E, share_E, num_tokens = _balance(probabilities_TE, experts_TK, communicator)
        tracker.add(probabilities_TE, weights_TK, experts_TK)
        ctx.normalize, ctx.tracker, ctx.communicator = normalize, tracker, communicator
        ctx.num_tokens = num_tokens
        # Sums over the shards of a sequence do not wait: they are an exchange.
        is_delayed = delayed is not None and communicator is None
        ctx.delayed = (delayed, weight_ED) if is_delayed else None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(experts_TK, share_E)
        ctx.save_for_backward(x_TD, weight_ED, probabilities_TE, experts_TK)
        return weights_TK, experts_TK, mean_E, share_E, x_TD.view_as(x_TD)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TK: torch.Tensor | None,
        _: None,
        grad_E: torch.Tensor | None,
        __: None,
        grad_x_TD: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        tracker: MemoryTracker = ctx.tracker
        with tracker.explain("the gate's backward pass"):
            return _gate_grads(ctx, grad_TK, grad_E, grad_x_TD)


def _has_wide_products(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> bool:
    """Return whether products of both need no wider factors: a GPU's have wider results."""
    return x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16


def _logits(x_TD: torch.Tensor, weight_ED: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x weightᵀ, of unrounded products."""
    if _has_wide_products(x_TD, weight_ED):
        return widened_mm(x_TD, weight_ED.T, dtype)
    logits_TE = x_TD.new_empty((len(x_TD), len(weight_ED)), dtype=dtype)
    transposed_DE = weight_ED.to(dtype).T
    for some in _blocks(x_TD, dtype):
        torch.mm(x_TD[some].to(dtype), transposed_DE, out=logits_TE[some])
    return logits_TE


def _balance(
    probabilities_TE: torch.Tensor, experts_TK: torch.Tensor, communicator: Communicator | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean probabilities, shares of pairs, and the number of tokens, at least 1.

    Args:
        communicator: of the ranks with the sequence's other shards, None without shards.
    """
    num_experts, top_k = probabilities_TE.shape[1], experts_TK.shape[1]
    sum_E = probabilities_TE.sum(dim=0)
    counts_E = counts_of(experts_TK.reshape(-1), num_experts)
    if communicator is not None:
        sums_2E = torch.stack((sum_E.double(), counts_E.double()))
        communicator.all_reduce(sums_2E, "the sum of the balance loss").wait()
        sum_E, counts_E = sums_2E[0].to(sum_E.dtype), sums_2E[1].to(counts_E.dtype)
    num_tokens = (counts_E.sum() // top_k).clamp(min=1)
    return sum_E / num_tokens, counts_E.to(sum_E.dtype) / (num_tokens * top_k), num_tokens


def counts_of(experts_N: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how often each expert occurs; `bincount` would look for the largest one first."""
    counts_E = experts_N.new_zeros(num_experts)
    return counts_E.scatter_add_(0, experts_N, torch.ones_like(experts_N))


def _gate_grads(
    ctx: Any,  # noqa: ANN401
    grad_TK: torch.Tensor | None,
    grad_E: torch.Tensor | None,
    grad_x_TD: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    x_TD, weight_ED, probabilities_TE, experts_TK = ctx.saved_tensors
    if grad_TK is None and grad_E is None:
        return grad_x_TD, None, None, None, None, None, None
    grad_TE = ctx.tracker.empty(
        "the gradient of the gate", probabilities_TE.shape, probabilities_TE
    ).zero_()
    if grad_E is not None:
        grad_TE += grad_E / ctx.num_tokens
    if grad_TK is not None:
        if ctx.normalize:
            chosen_TK = probabilities_TE.gather(1, experts_TK)
            grad_TK = _normalized_grad(grad_TK, chosen_TK)
        grad_TE.scatter_add_(1, experts_TK, grad_TK)
    grad_TE *= probabilities_TE
    grad_TE.addcmul_(probabilities_TE, grad_TE.sum(dim=-1, keepdim=True), value=-1)
    with torch.autocast(x_TD.device.type, enabled=False):
        halves_T2E = _halves(grad_TE) if _has_wide_products(x_TD, weight_ED) else None
        grad_ED = _weight_grads(ctx, grad_TE, halves_T2E, x_TD)
        if ctx.needs_input_grad[0]:
            grad_x_TD = torch.zeros_like(x_TD) if grad_x_TD is None else grad_x_TD
            if halves_T2E is not None:
                grad_x_TD.addmm_(halves_T2E, torch.cat((weight_ED, weight_ED)))
            else:
                _add_gemm(grad_x_TD, grad_TE, weight_ED)
    if grad_ED is not None and ctx.communicator is not None:
        ctx.communicator.all_reduce(grad_ED, "the sum of the gate's gradient").wait()
    if grad_ED is not None:
        grad_ED = grad_ED.to(weight_ED.dtype)
    return grad_x_TD, grad_ED, None, None, None, None, None


def _weight_grads(
    ctx: Any,  # noqa: ANN401
    grad_TE: torch.Tensor,
    halves_T2E: torch.Tensor | None,
    x_TD: torch.Tensor,
) -> torch.Tensor | None:
    """Return the weight's gradient, None where it is not wanted, or waits."""
    if not ctx.needs_input_grad[1]:
        return None
    if ctx.delayed is None:
        return _grad_of_weight(grad_TE, halves_T2E, x_TD)
    waiting, parameter = ctx.delayed
    waiting.put(lambda: add_gradient(parameter, _grad_of_weight(grad_TE, halves_T2E, x_TD)))
    return None


def _blocks(x_TD: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    """Return all tokens as one block, or several where the gate widens their values."""
    num_tokens, width = x_TD.shape
    values = _WIDENED_VALUES.get(x_TD.device.type, _WIDENED_VALUES["cuda"])
    step = max(1, num_tokens if x_TD.dtype == dtype else values // width)
    return [slice(low, low + step) for low in range(0, num_tokens, step)]


def _halves(grad_TE: torch.Tensor) -> torch.Tensor:
    """Return a float32 gradient as the sum of two bfloat16 ones (T, 2E), to 16 bits of mantissa."""
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


def _add_gemm(grad_x_TD: torch.Tensor, grad_TE: torch.Tensor, weight_ED: torch.Tensor) -> None:
    weight_ED = weight_ED.to(grad_TE.dtype)
    if grad_x_TD.dtype == grad_TE.dtype:
        grad_x_TD.addmm_(grad_TE, weight_ED)
        return
    for some in _blocks(grad_x_TD, grad_TE.dtype):
        grad_x_TD[some] += grad_TE[some] @ weight_ED


def _normalized_grad(grad_TK: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    """Return the gradient of c from that of c / Σc."""
    sum_T1 = chosen_TK.sum(dim=-1, keepdim=True)
    weighted_T1 = (grad_TK * chosen_TK).sum(dim=-1, keepdim=True) / sum_T1
    return (grad_TK - weighted_T1) / sum_T1
