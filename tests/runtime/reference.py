"""A dense MoE in plain float64 autograd: every expert computes every token."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Weights:
    gate: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    w3: torch.Tensor | None


def expert(x: torch.Tensor, weights: Weights, e: int, activation: str) -> torch.Tensor:
    hidden = x @ weights.w1[e]
    if weights.b1 is not None:
        hidden = hidden + weights.b1[e]
    if activation == "relu":
        hidden = hidden.clamp(min=0)
    elif activation == "gelu":
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    else:
        hidden = hidden * torch.sigmoid(hidden)
    if weights.w3 is not None:
        hidden = hidden * (x @ weights.w3[e])
    out = hidden @ weights.w2[e]
    return out if weights.b2 is None else out + weights.b2[e]


def dense_moe(
    x: torch.Tensor,
    weights: Weights,
    *,
    top_k: int,
    activation: str,
    normalize: bool,
    capacity_factor: float | None,
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return one rank's output (T, D), its balance loss and the pairs over the capacity.

    An expert takes the pairs with the largest weights.
    """
    num_tokens, num_experts = len(x), len(weights.gate)
    probabilities = torch.softmax(x @ weights.gate.T, -1)
    chosen = probabilities.detach().argsort(dim=-1, descending=True)[:, :top_k]
    picked = probabilities.gather(1, chosen)
    if normalize:
        picked = picked / picked.sum(-1, keepdim=True)
    capacity = math.inf
    if capacity_factor is not None:
        capacity = math.ceil(capacity_factor * num_tokens * top_k / num_experts)
    taken = [0] * num_experts
    share = torch.zeros(num_tokens, num_experts, dtype=x.dtype)
    mask = torch.zeros(num_tokens, top_k, dtype=x.dtype)
    dropped = 0
    for pair in picked.detach().reshape(-1).argsort(descending=True, stable=True).tolist():
        token, choice = divmod(pair, top_k)
        e = int(chosen[token, choice])
        if taken[e] < capacity:
            taken[e] += 1
            mask[token, choice] = 1
        else:
            dropped += 1
    share = share.scatter(1, chosen, picked * mask)
    y = torch.zeros_like(x)
    for e in range(num_experts):
        y = y + share[:, e : e + 1] * expert(x, weights, e, activation)
    if not num_tokens:
        return y, probabilities.sum(), dropped
    counts = torch.bincount(chosen.reshape(-1), minlength=num_experts).to(x.dtype)
    aux = num_experts * (counts / chosen.numel() * probabilities.mean(0)).sum()
    return y, aux, dropped
