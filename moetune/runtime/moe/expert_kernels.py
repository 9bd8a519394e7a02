"""The kernels for a step's experts: which are available here, why others are not, and Liger's.

`planned_layer` asks this module for the kernel that the plan or the layer's argument names.
Measuring asks which kernels exist. A missing or too old kernel is refused by name and version.

Liger's autograd function permutes tokens, runs the experts and combines. Here the layer permutes
and combines, so that chunks overlap. It calls each of Liger's Triton kernels separately, on rows
that are sorted by expert. The numbers are Liger's: sums are in float32, and two-byte rows are
rounded once for each product. The combine weights' gradients are added atomically. With more than
two tiles of hidden values the order varies, and bits may differ between runs.

Source: liger_kernel/ops/fused_moe.py and fused_moe_kernels.py, 0.8.3 to 0.8.5.

R rows, E local experts, D model width, H hidden width, F = 2·H, M tiles.
"""

import importlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from types import MappingProxyType
from typing import Any

import torch

from moetune.domain.errors import InputError
from moetune.domain.kernels import EXPERT_KERNELS, ExpertKernel
from moetune.domain.spelling import nearest_or
from moetune.runtime.moe.products import (
    GROUPED_MM,
    GroupedKernel,
    RowPart,
    grouped_problem,
    has_grouped,
)

LIGER_VERSION = (0, 8, 3)
"""The oldest version with the kernels that `liger` calls: they are the same in 0.8.3 to 0.8.5."""
_LIGER_DTYPES = frozenset({torch.bfloat16, torch.float16})
"""The dtypes on a GPU: Liger would multiply float32 in TF32."""
_INTERPRETED_DTYPES = frozenset({torch.float32, torch.float16})
"""Triton's interpreter multiplies bfloat16's bits as integers (3.7.1, `tl.dot`)."""
TILE_ROWS = 64
"""Liger's `BLOCK_M_TOKEN`: the rows of one expert that a program of its kernels takes."""
_MODULE = "liger_kernel.ops.fused_moe_kernels"
_PIECES = MappingProxyType({
    "_fused_down_proj_kernel": 18, "_fused_up_proj_swiglu_kernel": 22,
    "_moe_bwd_down_proj_kernel": 28, "_moe_bwd_dW2_kernel": 17,
})  # fmt: skip
"""The kernels that are called, and the number of their arguments, including block sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """A part's rows in tiles, each with rows of one expert; int32 on the device.

    Args:
        order_R: 0 … R − 1; Liger has the token of each row here.
        starts_E1: (E + 1,) first row of each expert, and R.
        rows_M: first row of each tile.
        experts_M: expert of each tile.
    """

    order_R: torch.Tensor
    starts_E1: torch.Tensor
    rows_M: torch.Tensor
    experts_M: torch.Tensor

    @classmethod
    def of(cls, part: RowPart) -> "_Tiles":
        """Return the tiles without a host sync: the host knows their number."""
        ends_E = part.ends_E
        assert ends_E is not None  # noqa: S101 - only parts with offsets have this kernel
        num_rows, num_tiles = sum(part.rows_E), sum(-(-rows // TILE_ROWS) for rows in part.rows_E)
        order_R = torch.arange(num_rows, device=ends_E.device, dtype=torch.int32)
        starts_E1 = torch.nn.functional.pad(ends_E, (1, 0))
        tiles_E = starts_E1.diff().add_(TILE_ROWS - 1).floor_divide_(TILE_ROWS)
        experts_M = torch.arange(len(ends_E), device=ends_E.device).repeat_interleave(
            tiles_E, output_size=num_tiles
        )
        first_E = tiles_E.cumsum(0, dtype=torch.int32).sub_(tiles_E)
        rows_M = torch.arange(num_tiles, device=ends_E.device, dtype=torch.int32)
        rows_M = rows_M.sub_(first_E[experts_M]).mul_(TILE_ROWS).add_(starts_E1[experts_M])
        return cls(
            order_R=order_R, starts_E1=starts_E1, rows_M=rows_M, experts_M=experts_M.int()
        )  # fmt: skip


class LigerExperts(GroupedKernel):
    """Liger's kernels; Triton tunes their block sizes on the first rows of each shape."""

    name = "liger"
    fuses_swiglu = True

    def product(self, a: torch.Tensor, b: torch.Tensor, part: RowPart) -> torch.Tensor:
        """Return the products, or the sums over each expert's rows."""
        tiles = _tiles(part)
        if b.dim() == a.dim():
            return self._sums(a.T, b, tiles)
        width_in, width_out = b.shape[1:]
        out = a.new_empty(len(a), width_out)
        self._kernels._fused_down_proj_kernel[_grid(tiles, width_out)](  # noqa: SLF001
            a, b, tiles.starts_E1, tiles.rows_M, tiles.experts_M, out,
            H_dim=width_out, I_dim=width_in,
            stride_post_TK=a.stride(0), stride_post_I=a.stride(1),
            stride_w_E=b.stride(0), stride_w_H=b.stride(2), stride_w_I=b.stride(1),
            stride_Y_TK=out.stride(0), stride_Y_H=out.stride(1), BLOCK_M=TILE_ROWS,
        )  # fmt: skip
        return out

    def swiglu_up(
        self, rows: torch.Tensor, w1: torch.Tensor, part: RowPart
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (g, u) and silu(g)·u, computed by a single kernel."""
        tiles, d_hidden = _tiles(part), w1.shape[2] // 2
        pre, hidden = (rows.new_empty(len(rows), num * d_hidden) for num in (2, 1))
        self._kernels._fused_up_proj_swiglu_kernel[_grid(tiles, d_hidden)](  # noqa: SLF001
            rows, w1, tiles.order_R, tiles.starts_E1, tiles.rows_M, tiles.experts_M, pre, hidden,
            H_dim=w1.shape[1], I_dim=d_hidden,
            stride_x_T=rows.stride(0), stride_x_H=rows.stride(1),
            stride_w_E=w1.stride(0), stride_w_N=w1.stride(2), stride_w_K=w1.stride(1),
            stride_pre_TK=pre.stride(0), stride_pre_N=pre.stride(1),
            stride_post_TK=hidden.stride(0), stride_post_N=hidden.stride(1), BLOCK_M=TILE_ROWS,
        )  # fmt: skip
        return pre, hidden

    def swiglu_down_backward(
        self,
        grad: torch.Tensor,
        w2: torch.Tensor,
        pre: torch.Tensor,
        weights_R1: torch.Tensor,
        part: RowPart,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all three gradients by a single kernel, with the weights' summed in float32."""
        tiles, d_hidden = _tiles(part), w2.shape[1]
        grad_pre, hidden = torch.empty_like(pre), pre.new_empty(len(pre), d_hidden)
        weight_grads = torch.zeros(len(pre), device=pre.device)  # which programs add to
        self._kernels._moe_bwd_down_proj_kernel[_grid(tiles, d_hidden)](  # noqa: SLF001
            grad, tiles.order_R, tiles.order_R, weights_R1, w2, pre, tiles.starts_E1,
            tiles.rows_M, tiles.experts_M, grad_pre, hidden, weight_grads,
            H_dim=w2.shape[2], I_dim=d_hidden,
            stride_dO_T=grad.stride(0), stride_dO_H=grad.stride(1),
            stride_w_E=w2.stride(0), stride_w_H=w2.stride(2), stride_w_I=w2.stride(1),
            stride_pre_TK=pre.stride(0), stride_pre_N=pre.stride(1),
            stride_d_pre_TK=grad_pre.stride(0), stride_d_pre_N=grad_pre.stride(1),
            stride_wact_TK=hidden.stride(0), stride_wact_I=hidden.stride(1), BLOCK_M=TILE_ROWS,
        )  # fmt: skip
        return grad_pre, hidden, weight_grads.unsqueeze(1)

    def _sums(self, x: torch.Tensor, y: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
        """Return xᵀ y of each expert's rows (E, in, out)."""
        num_experts, (width_in, width_out) = len(tiles.starts_E1) - 1, (x.shape[1], y.shape[1])
        out = x.new_empty(num_experts, width_in, width_out)

        def grid(sizes: dict[str, int]) -> tuple[int, int]:
            num_in, num_out = -(-width_in // sizes["BLOCK_M"]), -(-width_out // sizes["BLOCK_N"])
            return num_experts * num_in, num_out

        self._kernels._moe_bwd_dW2_kernel[grid](  # noqa: SLF001
            x, y, tiles.order_R, tiles.starts_E1, out, H_dim=width_out, I_dim=width_in,
            stride_wact_TK=x.stride(0), stride_wact_I=x.stride(1),
            stride_dout_T=y.stride(0), stride_dout_H=y.stride(1),
            stride_dW2_E=out.stride(0), stride_dW2_H=out.stride(2), stride_dW2_I=out.stride(1),
        )  # fmt: skip
        return out

    def load(self) -> None:
        """Import the kernels.

        Raises:
            ImportError, AttributeError: a package is missing, or Liger has other kernels.
        """
        for name, num_arguments in _PIECES.items():
            if len(getattr(self._kernels, name).arg_names) != num_arguments:
                raise AttributeError(f"{name} takes other arguments")

    @cached_property
    def _kernels(self) -> Any:  # noqa: ANN401 - a module without types, of a package that may lack
        return importlib.import_module(_MODULE)

    @property
    def is_interpreted(self) -> bool:
        """Return whether Triton's interpreter runs the kernels, which then take CPU tensors."""
        kernel = self._kernels._fused_down_proj_kernel  # noqa: SLF001 - Liger's pieces
        return type(kernel.fn).__name__ == "InterpretedFunction"


def _tiles(part: RowPart) -> _Tiles:
    """Return the part's tiles, made once."""
    tiles: _Tiles | None = part.prepared.get(LigerExperts.name)
    if tiles is None:
        tiles = part.prepared[LigerExperts.name] = _Tiles.of(part)
    return tiles


def _grid(tiles: _Tiles, width: int) -> Any:  # noqa: ANN401 - as Triton takes it
    """Return the grid of a kernel: each program has a tile of rows and a block of columns."""
    return lambda sizes: (len(tiles.rows_M), -(-width // sizes["BLOCK_N"]))


@cache
def liger_experts() -> LigerExperts:
    """Return Liger's kernels; the first product loads them."""
    return LigerExperts()


def check_kernel(name: object) -> None:
    """Raise InputError if no kernel has that name."""
    if name is not None and name not in EXPERT_KERNELS:
        hint = nearest_or(f"there are {', '.join(EXPERT_KERNELS)}", str(name), EXPERT_KERNELS)
        raise InputError(f"expert_kernel {name!r} is unknown", hint)


def kernel_problem(
    name: ExpertKernel, *, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]
) -> str:
    """Return why a kernel cannot take experts here; "" if it can.

    Args:
        dtype: dtype of the rows.
        widths: widths of the rows and of the hidden values.
    """
    problem = ""
    if name == "grouped_mm":
        problem = grouped_problem(device, dtype, widths)
    elif name == "liger":
        problem = _liger_problem(device, dtype)
    return problem and f"the expert kernel {name!r} cannot run here: {problem}"


def grouped_kernel(
    name: ExpertKernel | None, x: torch.Tensor, widths: tuple[int, ...]
) -> GroupedKernel | None:
    """Return the grouped kernel for all experts; None for a separate product per expert.

    Args:
        name: the kernel's name; None takes torch's if the GPU has it.
        x: rows.
        widths: as in `kernel_problem`.

    Raises:
        InputError: the kernel cannot take them here.
    """
    if name is None:
        return GROUPED_MM if has_grouped(x, widths) else None
    problem = kernel_problem(name, device=x.device, dtype=x.dtype, widths=widths)
    if problem:
        raise InputError(problem, "omit expert_kernel, or plan with --expert-kernel loop")
    if name == "loop":
        return None
    return GROUPED_MM if name == "grouped_mm" else liger_experts()


def _liger_problem(device: torch.device, dtype: torch.dtype) -> str:
    problem = liger_package()
    if problem:
        return problem
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        return "" if dtype in _LIGER_DTYPES else f"Liger takes bfloat16 on GPUs, not {name}"
    if not liger_experts().is_interpreted:
        return "Liger's Triton kernels run on GPUs; a CPU interprets them under TRITON_INTERPRET=1"
    return "" if dtype in _INTERPRETED_DTYPES else f"Triton's interpreter multiplies no {name}"


@cache
def liger_package() -> str:
    """Return which packages are missing or too old; "" if none is."""
    needed = ".".join(map(str, LIGER_VERSION))
    try:
        version = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return f"liger-kernel is not installed: pip install 'liger-kernel>={needed}'"
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < LIGER_VERSION:
        return f"liger-kernel {version} is installed, {needed} or newer is needed"
    try:
        liger_experts().load()
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        return f"liger-kernel {version} cannot be loaded: {error}"
    return ""
