"""Gradients of the experts' parameters: summed chunk by chunk, or made at once at the end.

`experts` adds each part's factors here. Sums need no memory beyond the gradients. Where a grouped
kernel takes all experts and memory is not reused, the factors are kept instead, and each parameter
has one product when everything has been sent back: nothing is summed or rounded by chunk, and the
products run while the last results travel.

R rows, E local experts.
"""

import itertools
from collections.abc import Sequence

import torch

from moetune.runtime.moe.activations import FusedForm
from moetune.runtime.moe.products import RowPart, add_product, widened_mm
from moetune.runtime.moe.workspace import MemoryTracker

_MATRICES = 3
"""Dimensions of one matrix for each expert; biases have two."""


class GradientSum:
    """The gradient of one parameter (E, …), summed over the parts.

    The sum of two-byte gradients is in float32 over several parts, and in the parameter's own
    dtype where that is wider than the step's (autocast): nothing is rounded on the way. An
    expert's first part is written, not added: filling with zeros first would touch large gradients
    twice.

    Args:
        weights: the parameter in the dtype of the step; the gradient has its order in memory.
        dtype: of the gradient, the parameter's own.
        scale: factor of the gradient.
        form: of fused experts, whose matrices may have another layout.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        num_parts: int,
        tracker: MemoryTracker,
        *,
        dtype: torch.dtype,
        scale: float = 1.0,
        form: FusedForm | None = None,
    ) -> None:
        narrow = weights.dtype.itemsize < torch.float32.itemsize
        exact = torch.float32 if narrow and num_parts > 1 else weights.dtype
        self._is_widened = dtype.itemsize > weights.dtype.itemsize
        self._tracker, self._dtype, self._scale = tracker, dtype, scale
        is_transposed = are_transposed(weights, form)
        self._stored = tracker.empty(
            "a gradient", weights.mT.shape if is_transposed else weights.shape, weights,
            dtype=dtype if self._is_widened else exact,
        )  # fmt: skip
        self._total = self._stored.mT if is_transposed else self._stored
        self._is_turned = is_transposed and form is None
        self._begun = [False] * len(weights)

    def add_gemm(self, x: torch.Tensor, y: torch.Tensor, part: RowPart) -> None:
        """Add xᵀ y of every expert's rows to its matrix."""
        for expert, low, high in part.blocks:
            x_T, y_rows, total = x[low:high].T, y[low:high], self._total[expert]
            if total.dtype != x.dtype and not self._is_widened and not x.is_cuda:
                # A CPU would widen both factors first, which takes longer than the product.
                self._add(expert, torch.mm(x_T, y_rows))
                continue
            is_first = not self._begun[expert]
            add_product(total, x_T, y_rows, is_first=is_first, scale=self._scale)
            self._begun[expert] = True

    def add_rows(self, y: torch.Tensor, part: RowPart) -> None:
        """Add the sum of every expert's rows to its row."""
        dtype = self._dtype if self._is_widened else None
        for expert, low, high in part.blocks:
            self._add(expert, _sum_of_rows(y[low:high], dtype))

    def total(self) -> torch.Tensor:
        """Return the gradient in the layout of the parameter, zero for experts without rows."""
        for expert, begun in enumerate(self._begun):
            if not begun:
                self._total[expert].zero_()
        made = self._stored
        if made.dtype != self._dtype:
            made = self._tracker.empty("a gradient", made.shape, made, dtype=self._dtype).copy_(
                made
            )
        return made.mT if self._is_turned else made

    def _add(self, expert: int, value: torch.Tensor) -> None:
        if self._scale != 1:
            value = value.to(self._total.dtype).mul_(self._scale)
        if self._begun[expert]:
            self._total[expert].add_(value)
        else:
            self._total[expert].copy_(value)
            self._begun[expert] = True


def are_transposed(weights: torch.Tensor, form: FusedForm | None) -> bool:
    """Return whether matrices (E, in, out) are (E, out, in) in memory; biases never are."""
    if weights.dim() != _MATRICES:
        return False
    if form is not None:
        return form.is_transposed
    return not weights.is_contiguous() and weights.mT.is_contiguous()


def _sum_of_rows(y: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the sum (width,); on a CPU as a product, which reads twice as fast."""
    if y.is_cuda or y.dtype.itemsize < torch.float32.itemsize:
        return y.sum(dim=0, dtype=dtype)
    return torch.mm(y.new_ones(1, len(y)), y).squeeze(0)


class DeferredProducts:
    """One product for each parameter, of all rows of the step in the order of the experts.

    Args:
        rows_CL: [piece][local expert] rows.
        places_R: of the rows in that order; None where they have it already.
        one_hot_RL: of the rows' experts, by (piece, expert); None without biases.
        scale: factor of the gradients.
        is_grouped: whether one kernel multiplies the rows of all experts.
    """

    def __init__(
        self,
        rows_CL: Sequence[Sequence[int]],
        counts_L: torch.Tensor,
        places_R: torch.Tensor | None,
        one_hot_RL: torch.Tensor | None,
        tracker: MemoryTracker,
        *,
        scale: float = 1.0,
        is_grouped: bool = True,
    ) -> None:
        self._is_grouped = is_grouped
        self._rows_L = [sum(cells) for cells in zip(*rows_CL, strict=True)]
        self._ends_L = counts_L.cumsum(0, dtype=torch.int32)
        self._places_R, self._tracker, self._scale = places_R, tracker, scale
        self._one_hot_RL = one_hot_RL if one_hot_RL is None else self.by_expert(one_hot_RL)
        self._kept: dict[str, torch.Tensor] = {}

    def keep(self, name: str, values: torch.Tensor, part: RowPart) -> None:
        """Keep a part's values, in place of what was kept under that name in that place."""
        if self._places_R is None:
            self._kept[name] = values
            return
        if name not in self._kept:
            shape = len(self._places_R), values.shape[1]
            self._kept[name] = self._tracker.empty("factors of gradients", shape, values)
        self._kept[name].index_copy_(0, self._places_R[part.rows], values)

    def kept(self, name: str) -> torch.Tensor:
        """Return all rows' values by expert."""
        return self._kept[name]

    def by_expert(self, values_R: torch.Tensor) -> torch.Tensor:
        """Return all rows' values, given by (piece, expert), by expert."""
        if self._places_R is None:
            return values_R
        made = self._tracker.empty("factors of gradients", values_R.shape, values_R)
        return made.index_copy_(0, self._places_R, values_R)

    def matrix(self, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return xᵀ y of every expert's rows, zero for experts without rows.

        Args:
            dtype: of the gradient: that of the factors, or a wider one.
        """
        if not self._is_grouped or dtype != x.dtype or not len(x):
            return self._one_by_one(x, y, dtype)
        made = self._grouped(x, y)
        self._tracker.add(made)
        return made if self._scale == 1 else made.mul_(self._scale)

    def rows(self, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of every expert's rows, zero for experts without rows."""
        assert self._one_hot_RL is not None  # noqa: S101 - experts have biases
        # The product's zeros do not keep another expert's NaN out.
        made = self._idle_are_zero(widened_mm(self._one_hot_RL.T, y, dtype))
        self._tracker.add(made)
        return made if self._scale == 1 else made.mul_(self._scale)

    def drop(self, name: str) -> None:
        """Forget what was kept under a name, if anything was."""
        self._kept.pop(name, None)

    def release(self) -> None:
        """Forget all that was kept."""
        self._kept.clear()

    def _grouped(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = torch._grouped_mm(x.T, y, offs=self._ends_L)  # noqa: SLF001 - no public name in 2.10
        # Nobody says that a kernel writes what it adds nothing to.
        return self._idle_are_zero(made)

    def _idle_are_zero(self, made: torch.Tensor) -> torch.Tensor:
        for expert, rows in enumerate(self._rows_L):
            if not rows:
                made[expert].zero_()
        return made

    def _one_by_one(self, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the same in a wider dtype: grouped kernels round to that of their factors."""
        shape = len(self._rows_L), x.shape[1], y.shape[1]
        made = self._tracker.empty("a gradient", shape, x, dtype=dtype)
        ends = itertools.accumulate(self._rows_L, initial=0)
        for total, (low, high) in zip(made, itertools.pairwise(ends), strict=True):
            if low == high:
                total.zero_()
            else:
                add_product(total, x[low:high].T, y[low:high], is_first=True, scale=self._scale)
        return made
