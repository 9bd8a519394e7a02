"""What torchtitan's selective recomputation keeps of a block, and the share it computes again.

Of a block its input, what every second matrix gives, attention's output, and what exchanges and
reductions over tensor ranks give; grouped GEMMs of experts are computed again
(`torchtitan/distributed/activation_checkpoint.py`, `SelectiveAC`, whose list of operations is that
of `torch._functorch.partitioners`).
"""

from collections.abc import Iterator, Mapping

from moetune.domain.architecture import Block, Part
from moetune.domain.attention import LatentAttention
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.training import FoldedLayout
from moetune.domain.units import dtype_bytes
from moetune.solve.training.modules import ModuleName

_ELEMENT, _FULL = dtype_bytes("bfloat16"), dtype_bytes("float32")
AGAIN: Mapping[ModuleName, float] = {
    "attention": 1 / 2, "mla_up_proj": 1 / 2, "mlp": 1 / 2, "shared_experts": 1 / 2, "norm": 1.0,
    "router": 1.0, "permute": 1.0, "experts": 1.0, "moe_act": 1.0,
}  # fmt: skip
"""Share of a module's forward pass that the backward pass repeats."""


def selective_modules(
    block: Block, layout: FoldedLayout, *, tokens: float, rows: float, d_model: int
) -> dict[str, float]:
    """Return the bytes of a block for one micro-batch by module.

    Args:
        tokens: of a rank, cut over tensor ranks.
        rows: of its experts that exchanges bring, and are kept.
    """
    found = {"inputs": _ELEMENT * tokens * d_model}
    saves = True
    for part in block.parts:
        name, kept = _name(part), 0.0
        for width in _widths(part, d_model):
            kept += _ELEMENT * tokens * width * saves
            saves = not saves
        if isinstance(part, RoutedExperts):
            kept += 2 * _ELEMENT * rows * part.d_expert
        elif not isinstance(part, DenseFfn):
            heads: int = getattr(part, "num_heads", 0)
            kept += tokens * (_ELEMENT * part.widths.get("output", 0) + _FULL * heads)
        if layout.tp > 1:
            kept += _ELEMENT * tokens * d_model
        found[name] = found.get(name, 0.0) + kept
    return found


def _name(part: Part) -> str:
    if isinstance(part, DenseFfn):
        return "mlp"
    return "experts" if isinstance(part, RoutedExperts) else part.name


def _widths(part: Part, d_model: int) -> Iterator[int]:
    """Yield the outputs of a part's matrices, in the order of their GEMMs."""
    if isinstance(part, RoutedExperts):
        if part.shared is not None:
            yield from _widths(part.shared, d_model)
    elif isinstance(part, DenseFfn):
        yield from (part.d_hidden,) * (part.num_gemms - 1)
        yield d_model
    elif isinstance(part, LatentAttention):
        widths = part.widths
        yield from (widths["q_latent"],) if widths["q_latent"] else ()
        yield widths["q"]
        yield widths["kv_latent"]
        yield part.num_heads * (part.nope_dim + part.v_head_dim)
        yield d_model
    else:
        yield from (width for name, width in part.widths.items() if name != "output" and width)
        yield d_model
