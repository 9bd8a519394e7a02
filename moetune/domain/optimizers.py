"""Optimizers of a decoder's training, by the bytes that they keep for each parameter.

Adam is Megatron-Core's, with bfloat16 parameters; `FLOAT32_ADAM` and `DEEPSPEED_ADAM` are the Adam
of other runtimes. Gradients accumulate in float32, or in bfloat16: then a step copies its shard to
float32. The precision-aware optimizer may keep the moments in bfloat16. Its float32 master copy may
keep only the 16 bits that the bfloat16 parameter lacks. It then reads bfloat16 gradients without a
copy. The master copy stays whole, and gradients are copied, if the optimizer's `fp8_recipe` is not
"delayed". Megatron-Bridge sets "tensorwise" for bfloat16 training, too, so that its recipes get
"adam-bf16-moments".

Muon keeps one moment, in float32, of the matrices of blocks, and Adam's two of the rest.

Source: megatron/core/optimizer, `optimizer_config.py` (`store_param_remainders`, `__post_init__`),
`distrib_optimizer.py` (`_copy_model_grads_to_main_grads`); Megatron-Bridge, `mixed_precision.py`.
"""

from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Literal, get_args

from moetune.domain.units import FULL_BYTES, dtype_bytes

OptimizerName = Literal[
    "adam", "adam-bf16-grads", "adam-bf16-moments", "adam-remainders", "adam-bf16", "muon"
]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Bytes that an optimizer keeps for one parameter.

    Args:
        gradient_bytes: bytes of the buffer that accumulates gradients of micro-batches.
        master_bytes: bytes of the master copy that updates are added to; 0 without a copy.
        moment_bytes: bytes of both moments.
        step_bytes: bytes of the gradient's copy that a step makes.
        adam_bytes: further bytes of parameters that Adam updates, not Muon.
    """

    name: OptimizerName
    gradient_bytes: int
    master_bytes: int
    moment_bytes: int
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
    def moved_bytes(self) -> int:
        """Bytes that a step moves: it reads gradients, updates states and writes parameters."""
        parameter = (1 + self.updates_parameters) * self.parameter_bytes
        return self.gradient_bytes + 2 * (self.state_bytes + self.step_bytes) + parameter

    @property
    def state_bytes(self) -> int:
        """Bytes of the master copy and the moments."""
        return self.master_bytes + self.moment_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of a parameter with its gradient and states."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes


def _megatron(
    name: OptimizerName, gradient: int, master: int, moment: int, step: int = 0
) -> Optimizer:
    is_precision_aware = name not in ("adam", "adam-bf16-grads")
    return Optimizer(
        name=name, gradient_bytes=gradient, master_bytes=master, moment_bytes=moment,
        step_bytes=step, is_precision_aware=is_precision_aware,
    )  # fmt: skip


MEGATRON_ADAM = _megatron("adam", gradient=4, master=4, moment=8)
_MEGATRON_OPTIMIZERS: MappingProxyType[OptimizerName, Optimizer] = MappingProxyType(
    {
        optimizer.name: optimizer
        for optimizer in (
            MEGATRON_ADAM,
            _megatron("adam-bf16-grads", gradient=2, master=4, moment=8, step=4),
            _megatron("adam-bf16-moments", gradient=2, master=4, moment=4, step=4),
            _megatron("adam-remainders", gradient=2, master=2, moment=8),
            _megatron("adam-bf16", gradient=2, master=2, moment=4),
            replace(MEGATRON_ADAM, name="muon", moment_bytes=4, adam_bytes=4),
        )
    }
)
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


def optimizer_of(name: OptimizerName) -> Optimizer:
    """Return the optimizer of that name."""
    return _MEGATRON_OPTIMIZERS[name]


@cache  # a plan asks for it for each peak
def layer_optimizer(dtype: str) -> Optimizer:
    """Return Adam of a single layer, whose gradients have the dtype of their parameter."""
    element = dtype_bytes(dtype)
    full = max(FULL_BYTES, element)
    return Optimizer(
        name="adam", parameter_bytes=element, gradient_bytes=element,
        master_bytes=full * (element < full), moment_bytes=2 * full,
    )  # fmt: skip
