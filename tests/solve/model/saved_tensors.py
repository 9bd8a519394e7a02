"""A decoder's block in torch, and the bytes that autograd saves for its backward pass.

Kernels that Megatron-Core takes as one are one function here: norms, rotary positions, attention's
core (FlashAttention: q, k, v, the output and the log-sum-exp) and the gated activation. A
recomputed module is `torch.utils.checkpoint` over the module and what reads its output; norms that
Transformer Engine fuses into the next projection are not recomputed alone.

T tokens, D model, H heads, K key heads, F hidden, E experts
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moetune.domain.attention import GroupedQueryAttention, LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts

Attention = GroupedQueryAttention | LatentAttention
Ffn = DenseFfn | RoutedExperts


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> Tensor:
        scale = x_TD.float().pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x_TD, scale)
        return (x_TD * scale).to(x_TD.dtype)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Rotate(torch.autograd.Function):
    """Rotary positions in one kernel, which saves the angles alone."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous() * 1

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Core(torch.autograd.Function):
    """FlashAttention."""

    @staticmethod
    def forward(ctx: Any, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor) -> Tensor:
        groups = q_THd.shape[1] // k_TKd.shape[1]
        scores = torch.einsum("thd,shd->hts", q_THd, k_TKd.repeat_interleave(groups, 1)).float()
        chances = scores.softmax(-1).to(v_TKd.dtype)
        out = torch.einsum("hts,shd->thd", chances, v_TKd.repeat_interleave(groups, 1)).contiguous()
        ctx.save_for_backward(q_THd, k_TKd, v_TKd, out, scores.logsumexp(-1))
        return out

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors[:3])


class Gate(torch.autograd.Function):
    """SwiGLU in one kernel, times the tokens' weights."""

    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, weights_T: Tensor) -> Tensor:
        ctx.save_for_backward(x_TF, weights_T)
        gate, up = x_TF.chunk(2, -1)
        return (functional.silu(gate) * up * weights_T.unsqueeze(-1)).to(x_TF.dtype)

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weights)


def applied(function: type[torch.autograd.Function], *inputs: Tensor) -> Tensor:
    out: Tensor = function.apply(*inputs)
    return out


@dataclass
class Counter:
    """Bytes of the storages that autograd saves, without parameters."""

    parameters: set[int]
    tensors: dict[int, Tensor]

    def pack(self, saved: Tensor) -> Tensor:
        pointer = saved.untyped_storage().data_ptr()
        if pointer not in self.parameters and saved.numel():
            self.tensors[pointer] = saved
        return saved

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


class TorchBlock:
    """Attention and one feed-forward part, on one device."""

    def __init__(self, attention: Attention, ffn: Ffn, recompute: tuple[str, ...]) -> None:
        self.attention, self.ffn, self.recompute = attention, ffn, recompute
        self.parameters: list[Tensor] = []

    def saved_bytes(self, tokens: int) -> int:
        """Return what one forward pass saves, with the block's own input."""
        x_TD = torch.randn(tokens, self.attention.d_model, dtype=torch.bfloat16)
        x_TD.requires_grad_()
        counter = Counter(parameters=set(), tensors={})
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda saved: saved):
            out_TD = self.run(("full",), self.block, x_TD)
        del out_TD  # the next block's input, and saved there
        owned = {tensor.untyped_storage().data_ptr() for tensor in self.parameters}
        counter.tensors = {at: tensor for at, tensor in counter.tensors.items() if at not in owned}
        return counter.bytes

    def run(self, modules: tuple[str, ...], module: Callable[..., Any], *inputs: Tensor) -> Any:
        if set(modules) & set(self.recompute):
            return checkpoint(module, *inputs, use_reentrant=False)
        return module(*inputs)

    def linear(self, x: Tensor, width: int) -> Tensor:
        weight = torch.randn(width, x.shape[-1], dtype=x.dtype).requires_grad_()
        self.parameters.append(weight)
        return functional.linear(x, weight)

    def norm(self, x: Tensor) -> Tensor:
        return applied(Norm, x)

    def block(self, x_TD: Tensor) -> Tensor:
        attend = self.latent if isinstance(self.attention, LatentAttention) else self.grouped
        mixed_TD = attend(x_TD)
        x_TD = x_TD + self.linear(mixed_TD, x_TD.shape[-1])
        feed = self.routed if isinstance(self.ffn, RoutedExperts) else self.dense
        fed: Tensor = self.run(("mlp",), feed, x_TD)
        return x_TD + fed

    def dense(self, x_TD: Tensor) -> Tensor:
        assert isinstance(self.ffn, DenseFfn)
        return self.last(self.linear(self.norm(x_TD), 2 * self.ffn.d_hidden))

    def last(self, hidden_TF: Tensor) -> Tensor:
        weights = torch.ones(len(hidden_TF), dtype=torch.bfloat16)
        return self.linear(applied(Gate, hidden_TF, weights), self.attention.d_model)

    def grouped(self, x_TD: Tensor) -> Tensor:
        part = self.attention
        assert isinstance(part, GroupedQueryAttention)
        heads, keys, width = part.num_heads, part.num_kv_heads, part.head_dim
        sizes = [heads * width, keys * width, keys * part.v_head_dim]

        def project(x_TD: Tensor) -> tuple[Tensor, ...]:
            q, k, v = self.linear(self.norm(x_TD), sum(sizes)).split(sizes, -1)
            # Transformer Engine takes tensors that are not contiguous as copies.
            return tuple(tensor.unflatten(-1, (-1, width)).contiguous() for tensor in (q, k, v))

        q, k, v = project(x_TD)
        if part.norm_parameters:
            q, k = self.norm(q), self.norm(k)
        given = applied(Rotate, q), applied(Rotate, k), v
        mixed: Tensor = self.run(("core_attn",), self.core, *given)
        return mixed

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return applied(Core, q, k, v).flatten(1)

    def latent(self, x_TD: Tensor) -> Tensor:
        part = self.attention
        assert isinstance(part, LatentAttention)
        assert part.q_rank is not None
        heads, rope = part.num_heads, part.rope_dim

        def compress(x_TD: Tensor) -> tuple[Tensor, Tensor]:
            normed = self.norm(x_TD)
            return self.linear(normed, part.q_rank or 0), self.linear(normed, part.kv_rank + rope)

        def expand(q_latent: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
            q_latent, kv_latent = self.norm(q_latent), self.norm(kv_latent)
            q = self.linear(q_latent, heads * (part.nope_dim + rope)).unflatten(-1, (heads, -1))
            kv = self.linear(kv_latent, heads * (part.nope_dim + part.v_head_dim))
            k, v = kv.unflatten(-1, (heads, -1)).split([part.nope_dim, part.v_head_dim], -1)
            key = torch.cat([k, applied(Rotate, k_rope).unsqueeze(1).expand(-1, heads, -1)], -1)
            given = applied(Rotate, q), key, v.contiguous()
            mixed: Tensor = self.run(("core_attn",), self.core, *given)
            return mixed

        q_latent, both = self.run(("norm",), compress, x_TD)
        kv_latent, k_rope = both.split([part.kv_rank, rope], -1)
        out: Tensor = self.run(("mla_up_proj",), expand, q_latent, kv_latent, k_rope)
        return out

    def routed(self, x_TD: Tensor) -> Tensor:
        if "moe" in self.recompute:
            # Its input is what the norm wrote, unless the norm is computed again, too.
            inner = self.run(("norm",), lambda x: self.norm(x) * 1, x_TD)
            out: Tensor = self.run(("moe",), lambda n: self.experts(*self.enter(n)), inner)
            return out
        entered = self.run(("norm",), lambda x: self.enter(self.norm(x)), x_TD)
        fed: Tensor = self.experts(*entered)
        return fed

    def enter(self, normed_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the router's scores, the tokens, and the shared experts' hidden vectors."""
        part = self.ffn
        assert isinstance(part, RoutedExperts)
        scores_TE = self.linear(normed_TD, part.num_experts).float()
        copies = normed_TD.repeat_interleave(part.top_k, 0)  # the permutation saves its map alone
        shared = part.shared
        if shared is None:
            return scores_TE, copies, None
        if "shared_experts" in self.recompute:
            out = checkpoint(lambda n: self.last(self.linear(n, 2 * shared.d_hidden)), normed_TD,
                             use_reentrant=False)  # fmt: skip
            return scores_TE, copies, out
        return scores_TE, copies, self.linear(normed_TD, 2 * shared.d_hidden)

    def experts(self, scores_TE: Tensor, rows_RD: Tensor, shared: Tensor | None) -> Tensor:
        part = self.ffn
        assert isinstance(part, RoutedExperts)
        chances_TE = scores_TE.softmax(-1)
        weights, _ = chances_TE.topk(part.top_k, -1)
        size = len(rows_RD) // part.num_experts
        outs: list[Tensor] = []
        for chunk, weight in zip(rows_RD.split(size), weights.flatten().split(size), strict=True):
            hidden = self.linear(chunk, 2 * part.d_hidden)
            outs.append(self.run(("moe_act",), self.second, hidden, weight))
        rows: Tensor = torch.cat(outs)
        out: Tensor = rows.reshape(-1, part.top_k, rows.shape[-1]).sum(1)
        if shared is None:
            return out
        return out + (shared if "shared_experts" in self.recompute else self.last(shared))

    def second(self, hidden_RF: Tensor, weights_R: Tensor) -> Tensor:
        return self.linear(applied(Gate, hidden_RF, weights_R), self.attention.d_model)
