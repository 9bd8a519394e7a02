"""What is measured is what the layer runs: the same operations on the same sizes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moetune.domain.samples import GemmPoint
from moetune.measure import expert_kernels
from moetune.measure.device import open_device
from moetune.runtime.moe.dispatch import ChunkLayout, GroupedRows
from moetune.runtime.moe.products import has_grouped
from moetune.runtime.moe.weight_grads import GradientSum
from moetune.runtime.moe.workspace import MemoryTracker
from tests.cuda_kit import FakeCuda

EXPERTS, ROWS, D_IN, D_OUT = 3, 4, 8, 16
UNEVEN = [5, 3, 4]
"""Rows of each expert, ROWS on average."""


class Listed(TorchDispatchMode):
    """Lists operations that are no views, with the shapes of what they are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.found: list[tuple[str, tuple[torch.Size, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "mm" in func._schema.name or func._schema.name == "aten::copy_":
            shapes = tuple(one.shape for one in args if isinstance(one, torch.Tensor))
            self.found.append((func._schema.name, shapes))
        return result


def listed(run: Callable[[], object]) -> list[tuple[str, tuple[torch.Size, ...]]]:
    mode = Listed()
    with mode:
        run()
    return mode.found


def gradient_of_the_layer(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return a later chunk's gradient of the weights as the layer runs it."""
    x, y = (torch.ones(EXPERTS * ROWS, width).to(device, dtype) for width in (D_IN, D_OUT))
    w = torch.ones(EXPERTS, D_IN, D_OUT).to(device, dtype)
    counts_CL, on_device_CL = [UNEVEN], torch.tensor([UNEVEN]).to(device)
    grouped = None
    if has_grouped(x, w):
        grouped = GroupedRows.of(on_device_CL, len(x), like=x, bias=False)
    ((part,),) = ChunkLayout.cut(counts_CL, (0, 1), grouped).parts
    num_parts, is_grouped = (2, False) if grouped is None else (1, True)
    total = GradientSum(w, num_parts, MemoryTracker("device"), dtype=w.dtype, is_grouped=is_grouped)
    total.add_gemm(x, y, part)
    return lambda: total.add_gemm(x, y, part)


POINT = GemmPoint(
    dtype="float32", product="grad_weight", num_experts=EXPERTS, rows=ROWS, d_in=D_IN, d_out=D_OUT
)
"""Other forms are the layer's own function, called by both."""


def test_a_cpus_gradients_are_those_of_the_layer() -> None:
    measured = listed(expert_kernels.gemm(POINT, open_device()))
    assert measured == listed(gradient_of_the_layer(torch.device("cpu"), torch.float32))
    assert len(measured) == EXPERTS


@pytest.mark.parametrize(("num_experts", "rows"), [(1, 7), (2, 8), (3, 2), (4, 16), (9, 5), (8, 1)])
def test_experts_of_a_measured_product_have_all_its_rows_between_them(
    num_experts: int, rows: int
) -> None:
    point = GemmPoint(dtype="float32", num_experts=num_experts, rows=rows, d_in=8, d_out=8)

    found = point.expert_rows

    assert sum(found) == num_experts * rows
    assert all(abs(one - rows) <= 1 and one > 0 for one in found)


def test_a_gpus_gradients_are_those_of_the_layer() -> None:
    with FakeCuda(1):
        point = replace(POINT, dtype="bfloat16")
        measured = listed(expert_kernels.gemm(point, open_device()))
        ran = listed(gradient_of_the_layer(torch.device("cuda", 0), torch.bfloat16))
    assert measured == ran
    assert [name for name, _ in ran] == ["aten::_grouped_mm"]
