"""Optimizers of a decoder's training, by the bytes that they keep for each parameter.

Adam is Megatron-Core's, with bfloat16 parameters; `FLOAT32_ADAM` and `DEEPSPEED_ADAM` are the Adam
of other runtimes. Gradients accumulate in float32, or in bfloat16: then a step copies its shard to
float32. The precision-aware optimizer may keep the moments in bfloat16. Its float32 master copy may
keep only the 16 bits that the bfloat16 parameter lacks. It then reads bfloat16 gradients without a
copy. The master copy stays whole, and gradients are copied, if the optimizer's `fp8_recipe` is not
"delayed". Megatron-Bridge sets "tensorwise" for bfloat16 training, too, so that its recipes get
"adam-bf16-moments".

Muon keeps one moment, in float32, of the matrices of blocks, and Adam's two of the rest.

"adam-8bit" keeps moments in 8 bits, with a float32 scale for each block of 256: 2.03 bytes, as
counted in bitsandbytes 0.50 and torchao 0.18. Its update is priced as Adam's in float32: published
runs are 6 % slower to 4 % faster (pytorch/ao, torchao/optim/README.md).

Source: megatron/core/optimizer, `optimizer_config.py` (`store_param_remainders`, `__post_init__`),
`distrib_optimizer.py` (`_copy_model_grads_to_main_grads`); Megatron-Bridge, `mixed_precision.py`.
"""

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal, get_args

from moetune.domain.units import FULL_BYTES, dtype_bytes

OptimizerName = Literal[
    "adam", "adam-bf16-grads", "adam-bf16-moments", "adam-remainders", "adam-bf16",
    "adam-bf16-states", "adam-8bit", "muon",
]  # fmt: skip
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
_BLOCK, _FLOAT32_MOMENTS = 256, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Bytes that an optimizer keeps for one parameter.

    Args:
        gradient_bytes: bytes of the buffer that accumulates gradients of micro-batches.
        master_bytes: bytes of the master copy that updates are added to; 0 without a copy.
        moment_bytes: bytes of both moments, with scales of blocks.
        step_bytes: bytes of the gradient's copy that a step makes.
        adam_bytes: further bytes of parameters that Adam updates, not Muon.
    """

    name: OptimizerName
    gradient_bytes: int
    master_bytes: int
    moment_bytes: float
    parameter_bytes: int = 2
    step_bytes: int = 0
    is_precision_aware: bool = False
    adam_bytes: int = 0

    @property
    def is_muon(self) -> bool:
        """Whether Muon updates the matrices of blocks, which replicas share whole."""
        return self.adam_bytes > 0

    @property
    def keeps_remainders(self) -> bool:
        """Whether the master copy keeps only the bits that the parameter lacks."""
        return 0 < self.master_bytes < FULL_BYTES

    @property
    def updates_parameters(self) -> bool:
        """Whether there is no master copy, because the parameters are in float32."""
        return not self.master_bytes

    @property
    def moved_bytes(self) -> float:
        """Bytes that a step moves: it reads gradients, updates states and writes parameters."""
        parameter = (1 + self.updates_parameters) * self.parameter_bytes
        moments = _FLOAT32_MOMENTS if self.name == "adam-8bit" else self.moment_bytes
        states = self.master_bytes + moments + self.step_bytes
        return self.gradient_bytes + 2 * states + parameter

    @property
    def state_bytes(self) -> float:
        """Bytes of the master copy and the moments."""
        return self.master_bytes + self.moment_bytes

    @property
    def total_bytes(self) -> float:
        """Bytes of a parameter with its gradient and states."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes


MEGATRON_ADAM = Optimizer(name="adam", gradient_bytes=4, master_bytes=4, moment_bytes=8)
_AWARE = replace(MEGATRON_ADAM, is_precision_aware=True)
_BF16_GRADS = replace(MEGATRON_ADAM, name="adam-bf16-grads", gradient_bytes=2, step_bytes=4)
_VARIANTS: MappingProxyType[OptimizerName, Optimizer] = MappingProxyType({
    optimizer.name: optimizer for optimizer in (
        MEGATRON_ADAM, _BF16_GRADS,
        replace(_BF16_GRADS, name="adam-bf16-moments", moment_bytes=4, is_precision_aware=True),
        replace(_AWARE, name="adam-remainders", gradient_bytes=2, master_bytes=2),
        replace(_AWARE, name="adam-bf16", gradient_bytes=2, master_bytes=2, moment_bytes=4),
        replace(_AWARE, name="adam-bf16-states", master_bytes=2, moment_bytes=4),
        replace(MEGATRON_ADAM, name="muon", moment_bytes=4, adam_bytes=4),
    )
})  # fmt: skip
FLOAT32_ADAM = Optimizer(
    name="adam", parameter_bytes=4, gradient_bytes=4, master_bytes=0, moment_bytes=8
)
"""The optimizer of torchtitan and transformers: AdamW on float32 parameters, which FSDP2 shards and
gathers in bfloat16 (`torchtitan/distributed/fsdp.py`, `MixedPrecisionPolicy`)."""
DEEPSPEED_ADAM = Optimizer(
    name="adam", gradient_bytes=2, master_bytes=4, moment_bytes=8, step_bytes=4
)
"""The optimizer of DeepSpeed: gradients in bfloat16, a float32 copy of a shard of them at the step
(`runtime/zero/stage_1_and_2.py`, `single_partition_of_fp32_groups`)."""


def optimizer_of(name: OptimizerName, adam: Optimizer = MEGATRON_ADAM) -> Optimizer:
    """Return the optimizer of that name, with a runtime's Adam."""
    if name == "adam":
        return adam
    if name == "adam-8bit":
        return replace(adam, name=name, moment_bytes=2 * (1 + FULL_BYTES / _BLOCK))
    if adam.updates_parameters:  # torchtitan's `fused_opt_states_bf16`
        return replace(adam, name=name, moment_bytes=4)
    return _VARIANTS[name]


def with_whole_master(optimizer: Optimizer) -> Optimizer:
    """Return a precision-aware optimizer with a float32 master copy, and gradients copied to it."""
    if not optimizer.is_precision_aware:
        return optimizer
    step = 0 if optimizer.gradient_bytes == FULL_BYTES else FULL_BYTES
    return replace(optimizer, master_bytes=FULL_BYTES, step_bytes=step)


@cache  # a plan asks for it for each peak
def layer_optimizer(dtype: str) -> Optimizer:
    """Return Adam of a single layer, whose gradients have the dtype of their parameter."""
    element = dtype_bytes(dtype)
    full = max(FULL_BYTES, element)
    return Optimizer(
        name="adam", parameter_bytes=element, gradient_bytes=element,
        master_bytes=full * (element < full), moment_bytes=2 * full,
    )  # fmt: skip
