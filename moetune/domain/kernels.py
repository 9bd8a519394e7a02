"""Kernels of experts, extra kernels of other runtimes, and tensors that experts keep."""

from dataclasses import dataclass
from typing import Literal, get_args

ExpertKernel = Literal["grouped_mm", "liger", "loop"]
"""Kernels for the GEMMs of experts: torch's for all experts at once, Liger's fused kernels, and a
loop over the experts."""
EXPERT_KERNELS: tuple[ExpertKernel, ...] = get_args(ExpertKernel)
KernelName = Literal["", "grouped_mm", "liger", "loop"]
"""A kernel, or "" for the layer's default: `grouped_mm` where the GPU has it, else a loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Predicted step with a kernel of the experts."""

    name: ExpertKernel
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The kernel of a plan's experts, the reason for it, and the other kernels, fastest first."""

    name: ExpertKernel
    is_usual: bool
    why: str
    others: tuple[KernelTime, ...] = ()


_Pair = tuple[float, float]

BIASED_ACTIVATION: _Pair = (27.0, 46.0)
BIASED_RESULTS: _Pair = (14.0, 15.0)
"""Extra tensors of experts that add biases, compared with a fused activation. The first pair is of
activation results, whose clamps, sigmoid, offset and weights are separate kernels. The second is
of expert results, whose biases are weighted in float32, split by expert and joined again
(Megatron-Core, `glu` and `_apply_bias` in core/transformer/moe/experts.py). CUDA graphs of the
whole iteration need Megatron-Core's fused experts, which have neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeKernels:
    """Memory traffic of a runtime's kernels in addition to that of fused kernels.

    The pairs are for the forward and the backward pass. They count additional reads and writes of
    bfloat16 tensors of the module's size. A float32 tensor counts twice.

    Args:
        norm: tensors of a norm's tokens, with the residual sum.
        activation: tensors of a gated activation's results.
        rows: tensors of experts' rows: permute, unpermute, weighting and sum.
        has_flash2: whether attention on Hopper is FlashAttention-2: 1.75 and 1.6 times the seconds
            of FlashAttention-3, forward and backward (arXiv 2407.08608, Figures 5 and 6).
        copies: whether gathered parameters are copied out of a buffer, and gradients into it.
        scale_bytes: bytes read of an element before it is rounded to 8 bits, for the largest value
            of its tensor; 0 if blocks have scales, or a scale is that of steps before.
        slowdown: remaining factor on the time of kernels, from public runs.
    """

    source: str = "Megatron-Core and Transformer Engine"
    norm: _Pair = (0.0, 0.0)
    rotary: _Pair = (0.0, 0.0)
    activation: _Pair = (0.0, 0.0)
    rows: _Pair = (0.0, 0.0)
    has_flash2: bool = False
    copies: bool = False
    scale_bytes: float = 0.0
    slowdown: float = 1.0


FUSED = RuntimeKernels()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptByExperts:
    """Tensors that routed experts keep for backward, without their rows and up-projections.

    Args:
        activations: whether activation results are kept, unless "moe_act" recomputes; else never.
        results: whether the result of each of a token's experts is kept, for the gradients of the
            combine weights. Otherwise these weights multiply the activation.
        router_copies: float32 copies of scores; three are logits, probabilities and the map.
    """

    activations: bool = True
    results: bool = False
    router_copies: int = 3


AS_MEGATRON = KeptByExperts()
TORCHTITAN = RuntimeKernels(
    source="torchtitan/models/common: rope.py, moe.py, token_dispatcher.py, without compile",
    norm=(1, 2),  # nn.RMSNorm is one kernel, the residual sum another
    rotary=(8, 8),  # complex products in float32
    activation=(2, 3),  # silu and product
    rows=(11, 20),  # scores multiplied in float32, scatter_add and its gradient
    has_flash2=True,  # FlexAttention and varlen attention, its default back ends, are as fast
    copies=True,
    slowdown=1.2,  # the median of its public runs
)
TRANSFORMERS = RuntimeKernels(
    source="transformers: models/qwen3_moe/modeling_qwen3_moe.py, integrations/moe.py (grouped_mm)",
    norm=(17, 33),  # seven kernels, most of them in float32
    rotary=(8, 10),  # rotate_half, two products and a sum
    activation=(2, 3),
    rows=(3, 11),
    has_flash2=True,  # torch's scaled_dot_product_attention
    copies=True,
    slowdown=1.2,  # as torchtitan's: its public runs do not say their batch
)
DEEPSPEED = RuntimeKernels(
    source="transformers' layers; deepspeed/module_inject/auto_ep.py has torchtitan's experts",
    norm=TRANSFORMERS.norm,
    rotary=TRANSFORMERS.rotary,
    activation=(2, 3),
    rows=TORCHTITAN.rows,
    has_flash2=True,
    slowdown=1.2,  # as torchtitan's: it has no public runs of experts
)
