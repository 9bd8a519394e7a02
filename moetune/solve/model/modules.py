"""Modules of a block: their names, the matrices of mixers, and seconds for one micro-batch."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moetune.domain.architecture import Mixer
from moetune.domain.attention import (
    CompressedAttention,
    GroupedQueryAttention,
    LatentAttention,
)

ModuleName = Literal[
    "attention", "mla_up_proj", "core_attn", "norm", "mlp", "router", "experts", "moe_act",
    "shared_experts", "permute", "exchange", "tensor_comm", "context_comm",
]  # fmt: skip
COMMUNICATION: frozenset[ModuleName] = frozenset({"exchange", "tensor_comm", "context_comm"})
CHUNK_TOKENS = 128
"""Tokens of a chunk of a recurrence."""
_WINDOW_TILE = 128
"""Keys that a kernel computes beside a sliding window's: half a tile at either end, twice."""


def head_dim_of(part: Mixer) -> float:
    """Return the mean width of a head's queries and values."""
    if isinstance(part, LatentAttention):
        return (part.nope_dim + part.rope_dim + part.v_head_dim) / 2
    if isinstance(part, GroupedQueryAttention):
        return (part.head_dim + part.v_head_dim) / 2
    return part.head_dim if isinstance(part, CompressedAttention) else math.inf


def computed_keys(part: Mixer) -> float:
    """Return the products of an attention kernel over those that its window needs."""
    if isinstance(part, GroupedQueryAttention | LatentAttention) and part.window is not None:
        return 1 + _WINDOW_TILE / part.window
    return 1.0


def projections_of(part: Mixer, d_model: int) -> Iterator[tuple[ModuleName, int, int, bool]]:
    """Yield (module, inputs, outputs, whether tensor parallelism cuts it) of a mixer's matrices.

    A matrix that is cut along its inputs is given with inputs and outputs swapped, which takes as
    long.
    """
    widths = part.widths
    output = widths.get("output", 0)
    if isinstance(part, LatentAttention):
        if widths["q_latent"]:
            yield "attention", d_model, widths["q_latent"] + widths["kv_latent"], False
            yield "mla_up_proj", widths["q_latent"], widths["q"], True
        else:
            yield "attention", d_model, widths["q"], True
            yield "attention", d_model, widths["kv_latent"], False
        heads = part.num_heads * (part.nope_dim + part.v_head_dim)
        yield "mla_up_proj", part.kv_rank, heads, True
    elif isinstance(part, CompressedAttention):
        yield "attention", d_model, widths["q_latent"] + widths["kv"], False
        yield "attention", widths["q_latent"], widths["q"], True
        yield "attention", output // part.out_groups, part.out_groups * part.out_rank, True
        output = widths["output_latent"]
    else:
        inner = sum(width for name, width in widths.items() if name != "output")
        yield "attention", d_model, inner, True
    yield "attention", d_model, output, True


class Passes(NamedTuple):
    """Seconds of a module's passes; sums are of each pass."""

    forward: float = 0.0
    grad_input: float = 0.0
    grad_weight: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":  # type: ignore[override]  # of passes, not of tuples
        return Passes(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    @property
    def backward(self) -> float:
        """Both gradients."""
        return self.grad_input + self.grad_weight


NO_TIME = Passes()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Seconds of a block's modules, or of some of them, for one micro-batch.

    Args:
        compute, communication: all of each, summed up once: a search asks them for every layout.
    """

    modules: Mapping[ModuleName, Passes]
    compute: Passes
    communication: Passes

    @classmethod
    def of(cls, modules: Iterable[tuple[ModuleName, Passes]]) -> "BlockTimes":
        """Return the times of modules, those of the same name as one."""
        found: dict[ModuleName, Passes] = {}
        compute = communication = NO_TIME
        for name, passes in modules:
            found[name] = found[name] + passes if name in found else passes
            if name in COMMUNICATION:
                communication += passes
            else:
                compute += passes
        return cls(modules=found, compute=compute, communication=communication)

    def __add__(self, other: "BlockTimes") -> "BlockTimes":
        return BlockTimes.of((*self.modules.items(), *other.modules.items()))

    def passes(self, name: ModuleName) -> Passes:
        """Return a module's passes, zero where the block has none."""
        return self.modules.get(name, NO_TIME)
