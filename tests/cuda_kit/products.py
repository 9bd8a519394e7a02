"""Products that only a GPU has, computed by the CPU that stands in for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def wider_products() -> Iterator[None]:
    """Let a CPU multiply into a wider dtype, as a GPU does: `out_dtype` of torch's products."""
    library = torch.library.Library("aten", "IMPL")

    def mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return a.to(dtype) @ b.to(dtype)

    def addmm_out(
        total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, *,
        beta: float = 1, alpha: float = 1, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        product = alpha * (a.to(dtype) @ b.to(dtype))
        return out.copy_(product if beta == 0 else beta * total + product)

    library.impl("mm.dtype", mm, "CPU")
    library.impl("addmm.dtype_out", addmm_out, "CPU")
    try:
        yield
    finally:
        library._destroy()
