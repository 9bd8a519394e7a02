"""Experts' gradients: sums over chunks, factors kept until a step's end, and means.

`experts` adds each chunk's factors here. The sums need no memory beyond the gradients.

R rows, E local experts.
"""

from collections.abc import Iterable, Mapping

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from moetune.comm.group import Communicator, OneRank
from moetune.runtime.autograd import is_in_backward
from moetune.runtime.moe.activations import FusedForm
from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.products import RowPart, add_product, widened_mm
from moetune.runtime.moe.workspace import empty

_MATRICES = 3
"""The number of dimensions of a matrix for each expert; biases have two."""


class GradientSum:
    """The gradient of one parameter (E, …), summed over chunks.

    Two-byte gradients are summed in float32 over several chunks, and in the parameter's dtype if
    that is wider than the step's (autocast). No partial sum is rounded. An expert's first rows are
    written, not added: filling with zeros first would touch large gradients twice. A grouped kernel
    takes all rows of a step at once, and rounds its sums once, to the dtype of the factors.

    Args:
        weights: the parameter in the step's dtype; the gradient has the same memory layout.
        dtype: dtype of the gradient, which is the parameter's.
        scale: factor of the gradient.
        form: form of fused experts, whose matrices may have another layout.
        is_whole: all rows of the step are added at once, and the memory is allocated then.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        num_chunks: int,
        *,
        dtype: torch.dtype,
        scale: float = 1.0,
        form: FusedForm | None = None,
        is_whole: bool = False,
    ) -> None:
        narrow = weights.dtype.itemsize < torch.float32.itemsize
        exact = torch.float32 if narrow and num_chunks > 1 and not is_whole else weights.dtype
        self._is_widened = dtype.itemsize > weights.dtype.itemsize
        self._dtype, self._scale = dtype, scale
        self._is_transposed = _are_transposed(weights, form)
        self._is_turned = self._is_transposed and form is None
        self._begun = [False] * len(weights)
        self._weights, self._sum_dtype = weights, dtype if self._is_widened else exact
        self._is_whole = is_whole
        if not is_whole:
            self._make()

    def add_gemm(self, x: torch.Tensor, y: torch.Tensor, part: RowPart) -> None:
        """Add xᵀ y of each expert's rows to the gradient of the expert's matrix."""
        if self._is_whole and len(x):
            a, b = (y, x) if self._is_transposed else (x, y)
            self._take(part.kernel.product(a.T, b, part), part)
            return
        if self._is_whole:
            self._make()
        for expert, low, high in part.blocks:
            x_T, y_rows, total = x[low:high].T, y[low:high], self._total[expert]
            if total.dtype != x.dtype and not self._is_widened and not x.is_cuda:
                # A CPU would widen both factors first, which takes longer than the product.
                self._add(expert, torch.mm(x_T, y_rows))
                continue
            is_first = not self._begun[expert]
            add_product(total, x_T, y_rows, is_first=is_first, scale=self._scale)
            self._begun[expert] = True

    def add_rows(self, y: torch.Tensor, part: RowPart, weights_R1: torch.Tensor | None) -> None:
        """Add the sum of each expert's rows to the gradient of the expert's bias.

        Args:
            weights_R1: factor of each row; None for 1.
        """
        if self._is_whole:
            # The product's zeros do not keep another expert's NaN out.
            experts_ER = part.weighted_experts(weights_R1).T
            self._take(widened_mm(experts_ER, y, self._dtype), part)
            return
        dtype = self._dtype if self._is_widened else None
        for expert, low, high in part.blocks:
            weights = None if weights_R1 is None else weights_R1[low:high]
            self._add(expert, _sum_of_rows(y[low:high], weights, dtype))

    def total(self) -> torch.Tensor:
        """Return the gradient in the parameter's layout; it is zero for experts without rows."""
        if not all(self._begun):
            for expert, begun in enumerate(self._begun):
                if not begun:
                    self._total[expert].zero_()
        made = self._stored
        if made.dtype != self._dtype:
            made = empty("a gradient", made.shape, made, dtype=self._dtype).copy_(made)
        return made.mT if self._is_turned else made

    def _make(self) -> None:
        """Allocate memory for the sums, in the parameter's layout."""
        shape = self._weights.mT.shape if self._is_transposed else self._weights.shape
        self._stored = empty("a gradient", shape, self._weights, dtype=self._sum_dtype)
        self._total = self._stored.mT if self._is_transposed else self._stored

    def _take(self, made: torch.Tensor, part: RowPart) -> None:
        """Take a grouped kernel's sums; sums of experts without rows are undefined."""
        self._stored = made if self._scale == 1 else made.mul_(self._scale)
        self._total = made.mT if self._is_transposed else made
        self._begun = list(map(bool, part.rows_E))

    def _add(self, expert: int, value: torch.Tensor) -> None:
        if self._scale != 1:
            value = value.to(self._total.dtype).mul_(self._scale)
        if self._begun[expert]:
            self._total[expert].add_(value)
        else:
            self._total[expert].copy_(value)
            self._begun[expert] = True


def _are_transposed(weights: torch.Tensor, form: FusedForm | None) -> bool:
    """Return whether matrices (E, in, out) are (E, out, in) in memory; False for biases."""
    if weights.dim() != _MATRICES:
        return False
    if form is not None:
        return form.is_transposed
    return not weights.is_contiguous() and weights.mT.is_contiguous()


def _sum_of_rows(
    y: torch.Tensor, weights_R1: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return the sum (width,); a CPU computes it as a product, which reads twice as fast."""
    if weights_R1 is not None:
        return widened_mm(weights_R1.to(y.dtype).T, y, dtype or y.dtype).squeeze(0)
    if y.is_cuda or y.dtype.itemsize < torch.float32.itemsize:
        return y.sum(dim=0, dtype=dtype)
    return torch.mm(y.new_ones(1, len(y)), y).squeeze(0)


class StepFactors:
    """The factors of parameters' gradients for a step's rows, kept until all chunks are sent back.

    Args:
        inputs_RD, grads_RD: the experts' inputs, and the arriving gradients of their results.
        weights_R1: the combine weights.

    Attributes:
        part: all rows of the step, by expert.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        inputs_RD: torch.Tensor,
        grads_RD: torch.Tensor,
        weights_R1: torch.Tensor,
    ) -> None:
        self._places_R = dispatch.by_expert_in_step()
        self._inputs_RD, self._grads_RD, self._weights_R1 = inputs_RD, grads_RD, weights_R1
        self._factors: dict[str, torch.Tensor] = {}
        self.part = dispatch.whole_part(self._by_expert)

    def keep(self, name: str, values: torch.Tensor, part: RowPart) -> None:
        """Keep a chunk's values under that name, at the chunk's places."""
        if self._places_R is None:
            self._factors[name] = values
            return
        if name not in self._factors:
            shape = len(self._places_R), values.shape[1]
            self._factors[name] = empty("factors of gradients", shape, values)
        self._factors[name].index_copy_(0, self._places_R[part.rows], values)

    def add_to(self, sums: Mapping[str, GradientSum]) -> None:
        """Multiply the kept factors, and add the products to `sums`, parameter by parameter."""
        if not sums.keys().isdisjoint(("w1", "b1", "w3")):
            inputs = self._by_expert(self._inputs_RD)
            for matrix, bias in (("w1", "b1"), ("w3", "")):
                grads = self._factors.pop(matrix, None)
                if grads is not None:
                    add_factors(sums, matrix, bias, inputs, grads, self.part)
                del grads
            del inputs
        if "w2" in self._factors:
            grads, weights_R1 = self._by_expert(self._grads_RD), self._by_expert(self._weights_R1)
            add_factors(sums, "w2", "b2", self._factors.pop("w2"), grads, self.part, weights_R1)

    def _by_expert(self, values_R: torch.Tensor) -> torch.Tensor:
        """Return all rows' values in expert order, given in (chunk, expert) order."""
        if self._places_R is None:
            return values_R
        made = empty("factors of gradients", values_R.shape, values_R)
        return made.index_copy_(0, self._places_R, values_R)


def add_factors(
    sums: Mapping[str, GradientSum],
    matrix: str,
    bias: str,
    x: torch.Tensor,
    y: torch.Tensor,
    part: RowPart,
    weights_R1: torch.Tensor | None = None,
) -> None:
    """Add xᵀ y to a matrix's gradient, and the sum of y's weighted rows to a bias's, if wanted."""
    if matrix in sums:
        sums[matrix].add_gemm(x, y, part)
    if bias in sums:
        sums[bias].add_rows(y, part, weights_R1)


class GradientMean:
    """The data-parallel means of experts' gradients, which are sums over their group's tokens.

    Replicas are averaged at the end of a backward pass, once its gradients are accumulated. Under
    DistributedDataParallel's `no_sync` gradients add up until the last micro-batch.

    Args:
        scale: factor of a pass's gradients, 1 / ranks of the experts' group.
        replicas: ranks with the same experts; a single rank if there are no replicas, or if a
            wrapper averages them.
    """

    def __init__(self, *, scale: float = 1.0, replicas: Communicator | None = None) -> None:
        self.scale, self.replicas = scale, replicas or OneRank()
        self._is_last = True
        self._made: dict[int, torch.Tensor] = {}

    def is_due(self) -> bool:
        """Return whether replicas are averaged after this forward pass's backward pass."""
        if self.replicas.num_ranks > 1 and not is_in_backward():
            wrapper = DistributedDataParallel._active_ddp_module  # noqa: SLF001 - as `no_sync`
            self._is_last = wrapper is None or wrapper.require_backward_grad_sync
            self._made.clear()  # of a pass that failed
        return self.replicas.num_ranks > 1 and self._is_last

    def average(self, parameters: Iterable[torch.Tensor | None]) -> None:
        """Average the parameters' gradients when the running backward pass ends.

        Args:
            parameters: the step's parameters; a view's gradient is that of its base.
        """
        for parameter in parameters:
            if parameter is not None and parameter.requires_grad:
                leaf = parameter if parameter.is_leaf else parameter._base  # noqa: SLF001 - no public name
                assert leaf is not None  # noqa: S101 - matrices that are turned are views
                self._made[id(leaf)] = leaf
        Variable._execution_engine.queue_callback(self._average_now)  # noqa: SLF001 - as FSDP2 does

    def _average_now(self) -> None:
        made, self._made = self._made, {}
        grads = [param.grad for param in made.values() if param.grad is not None]
        name = "the mean of experts' gradients over their replicas"
        self.replicas.sum_in_place(grads, name, divisor=self.replicas.num_ranks)
