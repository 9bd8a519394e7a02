"""The experts' activation functions, and their backward from what the forward pass kept.

Kept is the pre-activation; for relu its result, which serves as well, in place.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from moetune.domain.layer import Activation, LayerShape
from moetune.runtime.moe.workspace import MemoryTracker, Shape


def activate(
    pre: torch.Tensor, gate: torch.Tensor | None, activation: Activation, out: torch.Tensor
) -> torch.Tensor:
    """Return act(pre), for swiglu silu(pre) · gate, in `out`; relu happens in `pre` itself."""
    if activation == "relu":
        return pre.relu_()
    if activation == "gelu":
        return cast("torch.Tensor", torch.ops.aten.gelu.out(pre, out=out))
    torch.ops.aten.silu.out(pre, out=out)
    return out if gate is None else out.mul_(gate)


def hidden_shapes(
    activation: Activation, num_rows: int, d_hidden: int, *, backward: bool
) -> dict[str, Shape]:
    """Return the rooms that a phase needs besides the pre-activations of its largest chunk."""
    names = () if activation == "relu" else ("hidden",)
    return dict.fromkeys((*names, "grad hidden") if backward else names, (num_rows, d_hidden))


def hidden_room(
    pre: torch.Tensor, activation: Activation, rooms: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return where act(pre) goes: relu works in place and needs no room."""
    return pre if activation == "relu" else rooms["hidden"][: len(pre)]


def reactivate(
    kept: torch.Tensor, gate: torch.Tensor | None, activation: Activation, out: torch.Tensor
) -> torch.Tensor:
    """Return what `activate` returned, from what the forward pass kept."""
    return kept if activation == "relu" else activate(kept, gate, activation, out)


def activation_grad_(grad: torch.Tensor, pre: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return grad · act'(pre) in place of `grad`; for swiglu the activation is silu."""
    if activation == "relu":
        torch.ops.aten.threshold_backward.grad_input(grad, pre, 0, grad_input=grad)
    elif activation == "gelu":
        torch.ops.aten.gelu_backward.grad_input(grad, pre, grad_input=grad)
    else:
        torch.ops.aten.silu_backward.grad_input(grad, pre, grad_input=grad)
    return grad


_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = 63

Blocks = Sequence[tuple[int, int, int]]
"""(expert, low, high): rows low..high of a chunk belong to that local expert."""


class Experts(nn.Module):
    """Parameters of the local experts, rank r of P holding experts r·E/P … (r+1)·E/P − 1."""

    w1: nn.Parameter
    w2: nn.Parameter
    b1: nn.Parameter | None
    b2: nn.Parameter | None
    w3: nn.Parameter | None

    def __init__(
        self,
        layer: LayerShape,
        *,
        local_experts: int,
        bias: bool,
        is_replicated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.local_experts = local_experts
        wide, narrow = (layer.d_model, layer.d_hidden), (layer.d_hidden, layer.d_model)
        gated = layer.activation == "swiglu"
        shapes: dict[str, tuple[int, ...] | None] = {
            "w1": wide,
            "b1": wide[1:] if bias and not gated else None,
            "w2": narrow,
            "b2": narrow[1:] if bias and not gated else None,
            "w3": wide if gated else None,
        }
        for name, shape in shapes.items():
            value = None
            if shape is not None:
                empty = torch.empty((local_experts, *shape), device=device, dtype=dtype)
                value = nn.Parameter(empty)
                # Data parallel wrappers must not average what only this rank holds.
                value.allreduce = is_replicated  # type: ignore[attr-defined] # a tag others read
            self.register_parameter(name, value)

    def reset(self, seed: int, first_expert: int) -> None:
        """Draw every expert from its own generator: the same values whatever the ranks.

        Weights and biases are uniform within ±1/√fan_in, as those of `nn.Linear`.
        """
        for local in range(self.local_experts):
            generator = torch.Generator()
            mixed = seed ^ ((first_expert + local + 1) * _GOLDEN)
            generator.manual_seed(mixed & (2**_SEED_BITS - 1))
            for name, parameter in self.named_parameters():
                fan_in = self.w2.shape[1] if name.endswith("2") else self.w1.shape[1]
                bound = 1 / math.sqrt(fan_in)
                values = torch.empty(parameter.shape[1:], dtype=torch.float64)
                values.uniform_(-bound, bound, generator=generator)
                with torch.no_grad():
                    parameter[local].copy_(values)


def multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    blocks: Blocks,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    adds: bool = False,
) -> torch.Tensor:
    """Return every block's rows times its expert's matrix, plus its bias, in `out`.

    Args:
        x: (N, in), the blocks one after another.
        w: (E, in, out).
        out: (N, out).
        bias: (E, out).
        adds: to what is in `out`, without a bias.
    """
    if _has_grouped(x, w) and len(blocks) > 1:
        products = _grouped(x, w, blocks)
        out = out.add_(products) if adds else out.copy_(products)
        if bias is not None:
            for expert, low, high in blocks:
                out[low:high].add_(bias[expert])
        return out
    for expert, low, high in blocks:
        if adds:
            out[low:high].addmm_(x[low:high], w[expert])
        elif bias is None:
            torch.mm(x[low:high], w[expert], out=out[low:high])
        else:
            torch.addmm(bias[expert], x[low:high], w[expert], out=out[low:high])
    return out


class GradientSum:
    """The gradient of one parameter (E, …), summed over the chunks.

    Sums of two-byte numbers over several chunks are kept in float32. An expert's first chunk
    is written, not added: filling with zeros first would touch large gradients twice.
    """

    def __init__(self, parameter: torch.Tensor, num_chunks: int, account: MemoryTracker) -> None:
        narrow = parameter.dtype.itemsize < torch.float32.itemsize
        exact = torch.float32 if narrow and num_chunks > 1 else parameter.dtype
        self._account = account
        self._total = account.empty("a gradient", parameter.shape, parameter, dtype=exact)
        self._dtype = parameter.dtype
        self._begun = [False] * len(parameter)

    def add_products(self, x: torch.Tensor, y: torch.Tensor, blocks: Blocks) -> None:
        """Add every block's xᵀ y to its expert's matrix."""
        for expert, low, high in blocks:
            x_T, part, total = x[low:high].T, y[low:high], self._total[expert]
            if total.dtype != x.dtype:
                self._add(expert, torch.mm(x_T, part))
            elif self._begun[expert]:
                total.addmm_(x_T, part)
            else:
                torch.mm(x_T, part, out=total)
                self._begun[expert] = True

    def add_rows(self, y: torch.Tensor, blocks: Blocks) -> None:
        """Add the sum of every block's rows to its expert's row."""
        for expert, low, high in blocks:
            self._add(expert, y[low:high].sum(dim=0))

    def total(self) -> torch.Tensor:
        """Return the gradient, zero for experts without rows."""
        for expert, begun in enumerate(self._begun):
            if not begun:
                self._total[expert].zero_()
        if self._total.dtype == self._dtype:
            return self._total
        total = self._account.empty("a gradient", self._total.shape, self._total, dtype=self._dtype)
        return total.copy_(self._total)

    def _add(self, expert: int, part: torch.Tensor) -> None:
        if self._begun[expert]:
            self._total[expert].add_(part)
        else:
            self._total[expert].copy_(part)
            self._begun[expert] = True


def blocks_of(rows_CL: Sequence[Sequence[int]]) -> Blocks:
    """Return the non-empty blocks of rows laid out by (piece, local expert).

    Neighbouring blocks of one expert become one.
    """
    return tuple(_merged(rows_CL))


def _merged(rows_CL: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    cells = [(expert, rows) for pieces in rows_CL for expert, rows in enumerate(pieces) if rows]
    low = 0
    for expert, run in itertools.groupby(cells, key=lambda cell: cell[0]):
        high = low + sum(rows for _, rows in run)
        yield expert, low, high
        low = high


def _has_grouped(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether one kernel can take all blocks: CUDA's grouped GEMM wants 16-byte rows."""
    aligned = all(size * x.element_size() % 16 == 0 for size in w.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")


def _grouped(x: torch.Tensor, w: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    experts = [expert for expert, _, _ in blocks]
    matrices = w if experts == list(range(len(w))) else w[experts]
    ends = torch.tensor([high for _, _, high in blocks], dtype=torch.int32, device=x.device)
    return torch._grouped_mm(x, matrices, offs=ends)  # noqa: SLF001 - no public name in 2.10
