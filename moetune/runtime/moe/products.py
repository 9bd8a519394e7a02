"""Products of rows with the local experts' matrices: one kernel for all experts, or one for each.

`experts` and `weight_grads` call this on the rows of one chunk. Where a GPU has grouped kernels,
they find the rows of each expert by offsets on the device: no expert is left out and no matrix
copied, also where an expert has no row. Elsewhere there is a product for each expert.

R rows, E local experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

Blocks = Sequence[tuple[int, int, int]]
"""(expert, low, high): rows low..high of a part belong to that local expert."""

_ALIGNED_BYTES = 16
_GROUPED_CAPABILITIES = frozenset({(9, 0), (10, 0)})
"""GPUs that torch has a grouped kernel for; on others it reads offsets and loops over experts."""


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """Rows whose products are computed at once, ordered by expert: those of a chunk, or of a step.

    Args:
        rows: their places among all rows that this rank's experts compute in the step.
        rows_E: their numbers, by local expert.
        ends_E: (E,) int32, one past each expert's last row; None without grouped kernels.
        experts_RE: one-hot rows of each row's expert, in the rows' dtype; only with grouped
            kernels, and biases.
    """

    rows: slice
    rows_E: Sequence[int]
    ends_E: torch.Tensor | None = None
    experts_RE: torch.Tensor | None = None

    def weighted_experts(self, weights_R1: torch.Tensor | None) -> torch.Tensor:
        """Return the one-hot rows times each row's weight; only where there are one-hot rows."""
        assert self.experts_RE is not None  # noqa: S101 - asked before
        if weights_R1 is None:
            return self.experts_RE
        return self.experts_RE * weights_R1.to(self.experts_RE.dtype)

    @cached_property
    def blocks(self) -> Blocks:
        """The non-empty blocks of one expert each, counted from the part's first row."""
        blocks, low = [], 0
        for expert, rows in enumerate(self.rows_E):
            if rows:
                blocks.append((expert, low, low + rows))
            low += rows
        return blocks


def has_grouped(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Return whether one kernel takes the rows of several experts: in bfloat16, by 16 bytes.

    Args:
        w: (E, in, out).
    """
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    aligned = all(size * x.element_size() % _ALIGNED_BYTES == 0 for size in w.shape[1:])
    properties = torch.cuda.get_device_properties(x.device)
    is_known = hasattr(torch, "_grouped_mm")
    return is_known and aligned and (properties.major, properties.minor) in _GROUPED_CAPABILITIES


def grouped_product(a: torch.Tensor, b: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Return the products of all experts' rows by one kernel.

    Args:
        a: (R, in), or (in, R) to sum over each expert's rows.
        b: (E, in, out), or (R, out).
        ends_E: as of `RowPart`.

    Returns:
        (R, out), or (E, in, out), undefined for experts without rows.
    """
    if len(ends_E) == 1:
        return torch.mm(a, b[0]) if b.dim() > a.dim() else torch.mm(a, b).unsqueeze(0)
    made: torch.Tensor = torch._grouped_mm(a, b, offs=ends_E)  # noqa: SLF001 - no public name in 2.10
    return made


def multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    part: RowPart,
    out: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    weights_R1: torch.Tensor | None = None,
    *,
    adds: bool = False,
) -> torch.Tensor:
    """Return every row times its expert's matrix, plus its bias.

    Args:
        x: (R, in), of one part.
        w: (E, in, out).
        out: (R, out), for the result; with grouped kernels None takes what the kernel made.
        bias: (E, out).
        weights_R1: factor of every row's bias; None for 1.
        adds: add to the values in `out`; without a bias.
    """
    if part.ends_E is None or not len(x):
        return _one_by_one(x, w, part.blocks, out, bias, weights_R1, adds=adds)
    result = grouped_product(x, w, part.ends_E)
    if bias is not None and part.experts_RE is not None:
        result.addmm_(part.weighted_experts(weights_R1), bias)
    if out is None:
        return result
    return out.add_(result) if adds else out.copy_(result)


def _one_by_one(
    x: torch.Tensor,
    w: torch.Tensor,
    blocks: Blocks,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    weights_R1: torch.Tensor | None,
    *,
    adds: bool,
) -> torch.Tensor:
    if out is None:
        out = x.new_empty((len(x), w.shape[2]))
    for expert, low, high in blocks:
        if adds:
            out[low:high].addmm_(x[low:high], w[expert])
        elif bias is None or weights_R1 is not None:
            torch.mm(x[low:high], w[expert], out=out[low:high])
        else:
            torch.addmm(bias[expert], x[low:high], w[expert], out=out[low:high])
        if bias is not None and weights_R1 is not None:
            out[low:high].addcmul_(weights_R1[low:high].to(out.dtype), bias[expert])
    return out


def add_product(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, is_first: bool, scale: float = 1.0
) -> None:
    """Add scale · a b to a total, or write it there first: unrounded, if the total is wider.

    A total that is not written yet may hold anything, NaN too.
    """
    beta = 0 if is_first else 1
    if total.dtype == a.dtype:
        if is_first and scale == 1:
            torch.mm(a, b, out=total)
        else:
            total.addmm_(a, b, beta=beta, alpha=scale)
    elif total.is_cuda:
        torch.addmm(total, a, b, beta=beta, alpha=scale, out_dtype=total.dtype, out=total)
    else:  # no GEMM of a CPU has a wider output
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta, alpha=scale)


def widened_mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a b in a dtype that is wider than theirs, of unrounded products."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
