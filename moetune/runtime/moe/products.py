"""Products of rows with the local experts' matrices: a grouped kernel, or a product per expert.

`experts` and `weight_grads` call this on the rows of one chunk. A `GroupedKernel` locates each
expert's rows by offsets on the device. It leaves out no expert and copies no matrix, even if an
expert has no row. Without such a kernel each expert has a product. `expert_kernels` chooses the
kernel.

R rows, E local experts, D model width, H hidden width, F = 2·H.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from moetune.domain.kernels import ExpertKernel

Blocks = Sequence[tuple[int, int, int]]
"""Tuples (expert, low, high): rows low..high of a part belong to that local expert."""

_ALIGNED_BYTES = 16
_GPU_DTYPES = frozenset({torch.bfloat16})
_CPU_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_GROUPED_CAPABILITIES = frozenset({(9, 0), (10, 0)})
"""GPUs with a grouped kernel in torch; on others torch reads offsets and loops over experts."""


class GroupedKernel(ABC):
    """A kernel for the rows of all experts, which locates each expert's rows by offsets.

    Attributes:
        name: the kernel's name in plans.
        fuses_swiglu: whether it has `swiglu_up` and `swiglu_down_backward`.
    """

    name: ClassVar[ExpertKernel]
    fuses_swiglu: ClassVar[bool] = False

    def __reduce__(self) -> tuple[type["GroupedKernel"], tuple[()]]:
        """Return a fresh object: copies load the kernel again, as Python cannot copy its module."""
        return type(self), ()

    @abstractmethod
    def product(self, a: torch.Tensor, b: torch.Tensor, part: "RowPart") -> torch.Tensor:
        """Return the products of all experts' rows, or sums of products over each expert's rows.

        Args:
            a: (R, in), or (in, R) to sum over each expert's rows.
            b: (E, in, out), or (R, out).

        Returns:
            (R, out), or (E, in, out), undefined for experts without rows.
        """

    def swiglu_up(
        self, rows: torch.Tensor, w1: torch.Tensor, part: "RowPart"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (g, u) = x·W₁ (R, F) and silu(g)·u (R, H).

        Args:
            rows: (R, D).
            w1: (E, D, F), the gates first.
        """
        raise NotImplementedError

    def swiglu_down_backward(
        self,
        grad: torch.Tensor,
        w2: torch.Tensor,
        pre: torch.Tensor,
        weights_R1: torch.Tensor,
        part: "RowPart",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradient of (g, u) (R, F), weight · h (R, H), the weights' gradient (R, 1).

        Args:
            grad: gradient (R, D) of weight · h·W₂, with h = silu(g)·u.
            w2: (E, H, D).
            pre: (R, F), g and u.
        """
        raise NotImplementedError


class GroupedMM(GroupedKernel):
    """The kernel of torch's `grouped_mm`."""

    name = "grouped_mm"

    def product(self, a: torch.Tensor, b: torch.Tensor, part: "RowPart") -> torch.Tensor:
        """Return the products; a single expert has a plain product."""
        if len(part.rows_E) == 1:
            return torch.mm(a, b[0]) if b.dim() > a.dim() else torch.mm(a, b).unsqueeze(0)
        made: torch.Tensor = torch._grouped_mm(a, b, offs=part.ends_E)  # noqa: SLF001 - no public name in 2.10
        return made


GROUPED_MM = GroupedMM()


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """Rows whose products are computed together, ordered by expert: a chunk's, or a whole step's.

    Args:
        rows: the slice of all rows that this rank's experts compute in the step.
        rows_E: number of rows by local expert.
        ends_E: (E,) int32, one past each expert's last row; None without a grouped kernel.
        experts_RE: each row's expert as a one-hot row, in the rows' dtype; only with a grouped
            kernel and biases.
        kernel: the kernel that takes the offsets.
    """

    rows: slice
    rows_E: Sequence[int]
    ends_E: torch.Tensor | None = None
    experts_RE: torch.Tensor | None = None
    kernel: GroupedKernel = GROUPED_MM

    def weighted_experts(self, weights_R1: torch.Tensor | None) -> torch.Tensor:
        """Return the one-hot rows times each row's weight; only for parts with one-hot rows."""
        assert self.experts_RE is not None  # noqa: S101 - asked before
        if weights_R1 is None:
            return self.experts_RE
        return self.experts_RE * weights_R1.to(self.experts_RE.dtype)

    @cached_property
    def prepared(self) -> dict[str, Any]:
        """Data that kernels have prepared from the offsets, by kernel name."""
        return {}

    @cached_property
    def blocks(self) -> Blocks:
        """The non-empty blocks, each of one expert, counted from the part's first row."""
        blocks, low = [], 0
        for expert, rows in enumerate(self.rows_E):
            if rows:
                blocks.append((expert, low, low + rows))
            low += rows
        return blocks


def has_grouped(x: torch.Tensor, widths: tuple[int, ...]) -> bool:
    """Return whether torch's grouped kernel is the default here.

    On a CPU it is not: torch's loops over the experts there, and cannot write into given buffers.

    Args:
        widths: as in `grouped_problem`.
    """
    return x.is_cuda and not grouped_problem(x.device, x.dtype, widths)


def grouped_problem(device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]) -> str:
    """Return why torch's `grouped_mm` cannot take rows here; "" if it can.

    Args:
        widths: widths of the rows and of the hidden values, which must be multiples of 16 bytes.
    """
    name = str(dtype).removeprefix("torch.")
    if not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    if dtype not in (_GPU_DTYPES if device.type == "cuda" else _CPU_DTYPES):
        return f"torch's grouped_mm has no {name} on {device.type}"
    if any(width * dtype.itemsize % _ALIGNED_BYTES for width in widths):
        return f"torch's grouped_mm takes rows of multiples of 16 bytes, not {widths} of {name}"
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) in _GROUPED_CAPABILITIES:
        return ""
    return (
        "torch's grouped_mm has a kernel for GPUs of compute capability 9.0 and 10.0, "
        f"and this is {properties.major}.{properties.minor}"
    )


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
    """Return each row times its expert's matrix, plus the bias.

    Args:
        x: (R, in), the rows of one part.
        w: (E, in, out).
        out: (R, out), takes the result; None returns a new tensor.
        bias: (E, out).
        weights_R1: factor of each row's bias; None for 1.
        adds: add the result to the values in `out`; only without a bias.
    """
    if part.ends_E is None or not len(x):
        return _in_loop(x, w, part.blocks, out, bias, weights_R1, adds=adds)
    result = part.kernel.product(x, w, part)
    if bias is not None and part.experts_RE is not None:
        result.addmm_(part.weighted_experts(weights_R1), bias)
    if out is None:
        return result
    return out.add_(result) if adds else out.copy_(result)


def _in_loop(
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
    """Add scale · a b to a total, or overwrite it if `is_first`; a wider total is not rounded.

    A total that is not written yet may hold any values, even NaN.
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
    """Return a b in a wider dtype, without rounding to the factors' dtype."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
