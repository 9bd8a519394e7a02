"""Passes over memory of a layer of experts and of transformers' kernels, counted without a GPU.

    python -m benchmarks.layer_passes        # writes docs/results/layer-passes.md

A pass is a read or a write of all rows of a width, by an operation that is no matrix product.
`FakeCuda` reports a GPU, so that the layer takes the way that it takes there; the CPU computes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import moetune
from moetune.app.files import write_text
from tests.cuda_kit import FakeCuda

TOKENS, TOP_K, D_MODEL, D_HIDDEN, NUM_EXPERTS = 512, 8, 128, 96, 16
_QWEN3_30B = 768 / 2048  # its d_hidden over its d_model
_WIDTHS = {D_MODEL: "d_model", D_HIDDEN: "d_hidden", 2 * D_HIDDEN: "d_hidden"}
_ALLOCATE = ("aten.empty", "aten.new_empty", "aten._unsafe_view")
_PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "aten._grouped_mm")
_OVERWRITE = ("aten.copy_", "aten.zero_", "aten.fill_")
_PAGE = Path(__file__).parents[1] / "docs/results/layer-passes.md"
_HEAD = f"""# Passes over memory

Counted, not timed: one Qwen3-MoE layer, {TOKENS} tokens, {TOP_K} of {NUM_EXPERTS} experts,
bfloat16, as it runs on one GPU. A pass is a read or a write of all rows of a width, by an operation
that is no matrix product (`python -m benchmarks.layer_passes`). "Together" weighs them by the
widths of Qwen3-30B-A3B, 2,048 and 768, in passes of the first.

| experts | phase | of d_model | of d_hidden | together | operations |
|---|---|---:|---:|---:|---:|
"""


class Passes(TorchDispatchMode):
    """Counts values that operations read and write, by the width of their rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.counts = defaultdict[str, float](float)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and not str(func).startswith(_ALLOCATE):
            self.counts["operations"] += 1
            if not str(func).startswith(_PRODUCTS):
                for tensor in _touched(func, args, kwargs or {}, made):
                    self.counts[_width(tensor)] += _num_values(tensor)
        return made


def _touched(func: Any, args: Any, kwargs: Any, made: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor for each read and each write of it."""
    written = set()
    for place, item in enumerate(func._schema.arguments):  # noqa: SLF001
        is_written = item.alias_info is not None and item.alias_info.is_write
        is_read = not is_written or not (item.kwarg_only or str(func).startswith(_OVERWRITE))
        for tensor in _tensors(args[place] if place < len(args) else kwargs.get(item.name)):
            yield from (tensor,) * (is_written + is_read)
            written |= {tensor.data_ptr()} if is_written else set()
    yield from (tensor for tensor in _tensors(made) if tensor.data_ptr() not in written)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _width(tensor: torch.Tensor) -> str:
    is_weight = tensor.dim() < 2 or NUM_EXPERTS in tensor.shape  # noqa: PLR2004
    return "others" if is_weight else _WIDTHS.get(tensor.shape[-1], "others")


def _num_values(tensor: torch.Tensor) -> float:
    """Return the two-byte values in memory; an expanded dimension has one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return torch.Size(size for size, stride in sizes if stride).numel() * tensor.itemsize / 2


def passes(block: nn.Module, device: str) -> list[dict[str, float]]:
    """Return the passes of a forward and a backward pass of a block that has run before."""
    x = torch.randn(1, TOKENS, D_MODEL, dtype=torch.bfloat16).to(device).requires_grad_()
    block(x).sum().backward()
    with Passes() as forward:
        y = block(x)
    grad = torch.ones_like(y)
    with Passes() as backward:
        y.backward(grad)
    rows = {"d_model": TOKENS * TOP_K * D_MODEL, "d_hidden": TOKENS * TOP_K * D_HIDDEN}
    return [
        {name: count / rows.get(name, 1) for name, count in mode.counts.items()}
        for mode in (forward, backward)
    ]


def together(made: Mapping[str, float]) -> float:
    """Return the passes of both widths, in those of d_model at Qwen3-30B-A3B's widths."""
    return made["d_model"] + made["d_hidden"] * _QWEN3_30B


def count() -> dict[str, list[dict[str, float]]]:
    """Return the passes of both phases, by whose experts they are."""
    config = Qwen3MoeConfig(
        hidden_size=D_MODEL, moe_intermediate_size=D_HIDDEN, num_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"  # noqa: SLF001 - as from_pretrained sets it
    block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    theirs = passes(block, "cpu")
    with FakeCuda():
        ours = passes(moetune.adapt(block).to("cuda:0"), "cuda:0")
    return {"transformers' `grouped_mm`": theirs, "moetune's, one chunk": ours}


def main() -> None:
    """Count, print and write the page."""
    rows = ""
    for name, phases in count().items():
        for phase, made in zip(("forward", "backward"), phases, strict=True):
            rows += f"| {name} | {phase} | {made['d_model']:.2f} | {made['d_hidden']:.2f} "
            rows += f"| {together(made):.1f} | {made['operations']:.0f} |\n"
    print(rows)
    write_text(_PAGE, _HEAD + rows)


if __name__ == "__main__":
    main()
