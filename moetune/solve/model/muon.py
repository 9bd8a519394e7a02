"""Time of Muon's Newton-Schulz iteration, and the parameters that Adam updates instead.

Each matrix's momentum is orthogonalized in five steps of three products (Jordan et al., 2024;
Moonlight, arXiv 2502.16982). With sides s ≤ l a step computes X·Xᵀ (s·s·l MACs), its square (s³),
and a product with X (s·s·l). Megatron-Core multiplies in float32 with bfloat16 inside
(`muon_fp32_matmul_prec` "medium"); this is priced as bfloat16, which is modelled. Each tensor rank
iterates on its block (`muon_tp_mode` "blockwise"). Queries, keys and values are separate matrices,
gate and up are one matrix. Adam updates embedding, head and all parameters that are no matrix
(`emerging_optimizers.py`, `_is_nonlinear_or_embedding`).

Replicas share the work matrix by matrix (`LayerWiseDistributedOptimizer`). A rank takes its share
of the total, and at least the longest matrix.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from moetune.domain.architecture import Block
from moetune.domain.experts import RoutedExperts
from moetune.domain.training import FoldedLayout
from moetune.domain.tuning import ModelPart, Tuning, adapted_matrices, has_matrices
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import projections_of

STEPS = 5


class Orthogonal(NamedTuple):
    """Equal matrices of a device: their number and their sides.

    Args:
        is_expert: whether they belong to experts, so that replicas of experts share them.
    """

    num: int
    rows: int
    columns: int
    is_expert: bool = False

    @property
    def parameters(self) -> int:
        """Number of parameters of a single matrix."""
        return self.rows * self.columns


def matrices_of(
    block: Block, d_model: int, layout: FoldedLayout, tuning: Tuning
) -> Iterator[Orthogonal]:
    """Yield the matrices of a block that Muon updates on one device."""
    for part in block.parts:
        if isinstance(part, RoutedExperts):
            yield from _of_experts(part, layout, tuning)
        elif has_matrices(part, fuses=False):
            name: ModelPart = "dense" if hasattr(part, "d_hidden") else "attention"
            if tuning.trains(name):
                yield from _cut(part, layout.tp, fuses=name == "dense")
        elif tuning.trains("attention"):
            for _, d_in, d_out, is_cut in projections_of(part, d_model):  # type: ignore[arg-type]
                yield Orthogonal(1, max(1, d_out // (layout.tp if is_cut else 1)), d_in)


def _of_experts(part: RoutedExperts, layout: FoldedLayout, tuning: Tuning) -> Iterator[Orthogonal]:
    if tuning.trains("router"):
        yield Orthogonal(1, part.num_experts, part.d_model)
    if part.shared is not None and tuning.trains("shared_experts"):
        yield from _cut(part.shared, layout.tp, fuses=True)
    if not tuning.trains("experts"):
        return
    num, width = part.num_experts // layout.ep, max(1, part.d_hidden // layout.etp)
    yield Orthogonal(num, (part.num_gemms - 1) * width, part.d_expert, is_expert=True)
    yield Orthogonal(num, part.d_expert, width, is_expert=True)


def _cut(part: object, tp: int, *, fuses: bool) -> Iterator[Orthogonal]:
    """Yield the matrices of a dense part; the last is cut along inputs, others along outputs."""
    *columns, row = adapted_matrices(part, fuses=fuses)
    for matrix in columns:
        yield Orthogonal(1, max(1, matrix.d_out // (tp if matrix.is_cut else 1)), matrix.d_in)
    yield Orthogonal(1, row.d_out, max(1, row.d_in // tp))


def newton_schulz_seconds(device: DevicePrices, matrix: Orthogonal) -> float:
    """Return the seconds of the iteration for one matrix."""
    short, long = sorted((matrix.rows, matrix.columns))
    products = (
        device.gemm("forward", rows=short, d_in=long, d_out=short),
        device.gemm("forward", rows=short, d_in=short, d_out=short),
        device.gemm("forward", rows=short, d_in=short, d_out=long),
    )
    return STEPS * sum(products)


def shared_seconds(
    device: DevicePrices,
    blocks: Iterable[tuple[int, tuple[Orthogonal, ...]]],
    sharers: tuple[int, int],
) -> float:
    """Return the seconds of a replica for its share of a rank's dense and expert matrices."""
    totals, longest = [0.0, 0.0], [0.0, 0.0]
    for count, matrices in blocks:
        for matrix in matrices if count else ():
            seconds = newton_schulz_seconds(device, matrix)
            totals[matrix.is_expert] += count * matrix.num * seconds
            longest[matrix.is_expert] = max(longest[matrix.is_expert], seconds)
    parts = zip(totals, sharers, longest, strict=True)
    return sum(max(total / num, least) for total, num, least in parts)
