"""Compute on one chunk's rows: activation functions, the experts' GEMMs, sums of gradients.

`experts` calls this on rows in contiguous blocks, each of one expert. Results go to the caller's
buffers, because fresh ones cost page faults: up to three times the operation that fills them on a
CPU. The backward of an activation needs its input, the pre-activation; relu alone works in place,
because its derivative can be read from its result.

R rows, D model width, H hidden width, E local experts.
"""

import itertools
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import cast

import torch

from moetune.domain.layer import Activation
from moetune.runtime.moe.workspace import MemoryTracker

Blocks = Sequence[tuple[int, int, int]]
"""(expert, low, high): rows low..high of a chunk belong to that local expert."""

_DOT_VALUES = MappingProxyType({"cpu": 2**15, "cuda": 2**22})
"""Values of dy·W₂ᵀ times h that are computed at once: few enough for a CPU's cache, and many
enough to keep a GPU's kernel launches few."""


def blocks_of(rows_CL: Sequence[Sequence[int]]) -> Blocks:
    """Return the non-empty blocks of rows ordered by (piece, local expert).

    Neighbouring blocks of one expert become one, so that one GEMM takes them.
    """
    return tuple(_merged(rows_CL))


def _merged(rows_CL: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int]]:
    cells = [(expert, rows) for pieces in rows_CL for expert, rows in enumerate(pieces) if rows]
    low = 0
    for expert, run in itertools.groupby(cells, key=lambda cell: cell[0]):
        high = low + sum(rows for _, rows in run)
        yield expert, low, high
        low = high


def activate(
    pre: torch.Tensor, gate: torch.Tensor | None, activation: Activation, out: torch.Tensor
) -> torch.Tensor:
    """Return act(pre), for swiglu silu(pre) · gate, in `out`; relu works in place of `pre`."""
    if activation == "relu":
        return pre.relu_()
    if activation == "gelu":
        return cast("torch.Tensor", torch.ops.aten.gelu.out(pre, out=out))
    torch.ops.aten.silu.out(pre, out=out)
    return out if gate is None else out.mul_(gate)


def activate_again(
    saved: torch.Tensor, gate: torch.Tensor | None, activation: Activation, out: torch.Tensor
) -> torch.Tensor:
    """Return the result of `activate` again, from the saved pre-activation (for relu: result)."""
    return saved if activation == "relu" else activate(saved, gate, activation, out)


def activation_grad_(grad: torch.Tensor, pre: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return grad · act'(pre) in place of `grad`; for swiglu the activation is silu."""
    if activation == "relu":
        torch.ops.aten.threshold_backward.grad_input(grad, pre, 0, grad_input=grad)
    elif activation == "gelu":
        torch.ops.aten.gelu_backward.grad_input(grad, pre, grad_input=grad)
    else:
        torch.ops.aten.silu_backward.grad_input(grad, pre, grad_input=grad)
    return grad


def expert_gemm(
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
        x: (R, in), the blocks one after another.
        w: (E, in, out).
        out: (R, out).
        bias: (E, out).
        adds: add to the values in `out`; without a bias.
    """
    if _has_grouped(x, w) and len(blocks) > 1:
        result = _grouped(x, w, blocks)
        out = out.add_(result) if adds else out.copy_(result)
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


def _has_grouped(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return whether one kernel can take all blocks: CUDA's grouped GEMM wants 16-byte rows."""
    aligned = all(size * x.element_size() % 16 == 0 for size in w.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(torch, "_grouped_mm")


def _grouped(x: torch.Tensor, w: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    experts = [expert for expert, _, _ in blocks]
    matrices = w if experts == list(range(len(w))) else w[experts]
    ends = torch.tensor([high for _, _, high in blocks], dtype=torch.int32, device=x.device)
    return torch._grouped_mm(x, matrices, offs=ends)  # noqa: SLF001 - no public name in 2.10


class GradientSum:
    """The gradient of one parameter (E, …), summed over the chunks.

    The sum of two-byte gradients is in float32 over several chunks, and in the parameter's own
    dtype where that is wider than the step's (autocast): nothing is rounded on the way. An
    expert's first chunk is written, not added: filling with zeros first would touch large gradients
    twice.

    Args:
        weights: the parameter in the dtype of the step.
        dtype: of the gradient, the parameter's own.
        scale: factor of the gradient.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        num_chunks: int,
        tracker: MemoryTracker,
        *,
        dtype: torch.dtype,
        scale: float = 1.0,
    ) -> None:
        narrow = weights.dtype.itemsize < torch.float32.itemsize
        exact = torch.float32 if narrow and num_chunks > 1 else weights.dtype
        self._is_widened = dtype.itemsize > weights.dtype.itemsize
        self._tracker, self._dtype, self._scale = tracker, dtype, scale
        self._total = tracker.empty(
            "a gradient", weights.shape, weights, dtype=dtype if self._is_widened else exact
        )
        self._begun = [False] * len(weights)

    def add_gemm(self, x: torch.Tensor, y: torch.Tensor, blocks: Blocks) -> None:
        """Add every block's xᵀ y to its expert's matrix."""
        for expert, low, high in blocks:
            x_T, part, total = x[low:high].T, y[low:high], self._total[expert]
            if total.dtype != x.dtype and not self._is_widened:
                self._add(expert, torch.mm(x_T, part))
                continue
            if total.dtype != x.dtype:
                _add_widened(total, x_T, part, is_first=not self._begun[expert], scale=self._scale)
            elif self._scale != 1:  # beta 0 ignores the memory's old content, NaN too
                total.addmm_(x_T, part, beta=self._begun[expert], alpha=self._scale)
            elif self._begun[expert]:
                total.addmm_(x_T, part)
            else:
                torch.mm(x_T, part, out=total)
            self._begun[expert] = True

    def add_rows(self, y: torch.Tensor, blocks: Blocks) -> None:
        """Add the sum of every block's rows to its expert's row."""
        dtype = self._dtype if self._is_widened else None
        for expert, low, high in blocks:
            self._add(expert, y[low:high].sum(dim=0, dtype=dtype))

    def total(self) -> torch.Tensor:
        """Return the gradient, zero for experts without rows."""
        for expert, begun in enumerate(self._begun):
            if not begun:
                self._total[expert].zero_()
        if self._total.dtype == self._dtype:
            return self._total
        total = self._tracker.empty("a gradient", self._total.shape, self._total, dtype=self._dtype)
        return total.copy_(self._total)

    def _add(self, expert: int, part: torch.Tensor) -> None:
        if self._scale != 1:
            part = part.to(self._total.dtype).mul_(self._scale)
        if self._begun[expert]:
            self._total[expert].add_(part)
        else:
            self._total[expert].copy_(part)
            self._begun[expert] = True


def _add_widened(
    total: torch.Tensor, x_T: torch.Tensor, y: torch.Tensor, *, is_first: bool, scale: float
) -> None:
    """Add scale · xᵀ y, unrounded, to a total of a wider dtype, or write it there first."""
    beta = 0 if is_first else 1
    if total.is_cuda:
        torch.addmm(total, x_T, y, beta=beta, alpha=scale, out_dtype=total.dtype, out=total)
    else:  # no GEMM of a CPU has a wider output
        total.addmm_(x_T.to(total.dtype), y.to(total.dtype), beta=beta, alpha=scale)


class CombineWeights:
    """The combine weights of one chunk's rows where the experts apply them, and their gradients.

    The gradient of a weight is ⟨dy, o⟩. Policies that do not save the results o compute it at the
    expert, as ⟨dy·W₂ᵀ, h⟩ + ⟨dy, b₂⟩, which is equal.

    Args:
        weights_R1, grads_R1: (R, 1).
        b2: (E, D), None without biases.
    """

    def __init__(
        self, weights_R1: torch.Tensor, grads_R1: torch.Tensor, b2: torch.Tensor | None
    ) -> None:
        self._weights_R1, self._grads_R1, self._b2 = weights_R1, grads_R1, b2

    def apply(
        self,
        grad: torch.Tensor,
        hidden: torch.Tensor,
        grad_hidden: torch.Tensor,
        blocks: Blocks,
    ) -> None:
        """Write the weights' gradients, then weight both gradients in place.

        Args:
            grad: (R, D), dy of every row.
            grad_hidden: (R, H), dy·W₂ᵀ.
        """
        values = _DOT_VALUES.get(grad.device.type, _DOT_VALUES["cuda"])
        step = max(1, values // hidden.shape[1])
        for low in range(0, len(grad), step):
            some = slice(low, low + step)
            out = self._grads_R1[some]
            torch.sum(grad_hidden[some] * hidden[some], dim=1, keepdim=True, out=out)
        if self._b2 is not None:
            for expert, low, high in blocks:
                self._grads_R1[low:high] += grad[low:high] @ self._b2[expert].unsqueeze(1)
        grad.mul_(self._weights_R1)
        grad_hidden.mul_(self._weights_R1)
