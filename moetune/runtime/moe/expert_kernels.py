"""The kernel of a step's experts: which there are here, why others are not, and which is taken.

`planned_layer` asks this for the kernel that the plan or the layer's argument names; measuring asks
which there are. A kernel that is missing or too old is refused by name, with its version.
"""

from functools import cache
from importlib import metadata

import torch

from moetune.domain.errors import InputError
from moetune.domain.kernels import EXPERT_KERNELS, ExpertKernel
from moetune.domain.spelling import nearest_or
from moetune.runtime.moe.liger import LigerExperts
from moetune.runtime.moe.products import GROUPED_MM, GroupedKernel, grouped_problem, has_grouped

LIGER_VERSION = (0, 8, 3)
"""The oldest whose kernels are those that `liger` was written for: 0.8.3 to 0.8.5 have the same."""
_LIGER_DTYPES = frozenset({torch.bfloat16, torch.float16})
"""On a GPU: float32 would be multiplied in TF32."""
_INTERPRETED_DTYPES = frozenset({torch.float32, torch.float16})
"""Triton's interpreter multiplies the bits of bfloat16 as whole numbers (3.7.1, `tl.dot`)."""


@cache
def liger_experts() -> LigerExperts:
    """Return Liger's kernels, which are loaded with the first product."""
    return LigerExperts()


def check_kernel(name: object) -> None:
    """Raise InputError where there is no kernel of that name."""
    if name is not None and name not in EXPERT_KERNELS:
        hint = nearest_or(f"there are {', '.join(EXPERT_KERNELS)}", str(name), EXPERT_KERNELS)
        raise InputError(f"expert_kernel {name!r} is unknown", hint)


def kernel_problem(
    name: ExpertKernel, *, device: torch.device, dtype: torch.dtype, widths: tuple[int, ...]
) -> str:
    """Return why a kernel cannot take experts here; "" if it can.

    Args:
        dtype: of the rows.
        widths: of the rows and of the hidden values.
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
    """Return the kernel for all experts at once; None for a product for each.

    Args:
        name: None takes torch's where the GPU has it.
        x: rows.
        widths: as of `kernel_problem`.

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
    """Return what is missing of the packages, or too old; "" for nothing."""
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
