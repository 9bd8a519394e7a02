"""Optimizers of a decoder's training, by the bytes that they keep for each parameter.

Adam as Megatron-Core has it, with bfloat16 parameters. Its precision-aware optimizer keeps of a
float32 master copy the 16 bits that the bfloat16 parameter lacks, adds gradients up in bfloat16,
and may keep the moments in bfloat16, too (`optimizer_config.py`: `store_param_remainders`,
`main_grads_dtype`, `exp_avg_dtype`, `exp_avg_sq_dtype`).
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

OptimizerName = Literal["adam", "adam-remainders", "adam-bf16"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Bytes that an optimizer keeps for one parameter.

    Args:
        gradient_bytes: of the buffer that gradients of micro-batches are added up in.
        master_bytes: of the copy that updates are added to, besides the parameter.
        moment_bytes: of both moments.
        is_precision_aware: whether it is Megatron-Core's precision-aware optimizer.
    """

    name: OptimizerName
    gradient_bytes: int
    master_bytes: int
    moment_bytes: int
    is_precision_aware: bool = True

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's own states."""
        return self.master_bytes + self.moment_bytes


_KNOWN: MappingProxyType[OptimizerName, Optimizer] = MappingProxyType(
    {
        "adam": Optimizer(
            name="adam", gradient_bytes=4, master_bytes=4, moment_bytes=8, is_precision_aware=False
        ),
        "adam-remainders": Optimizer(
            name="adam-remainders", gradient_bytes=2, master_bytes=2, moment_bytes=8
        ),
        "adam-bf16": Optimizer(name="adam-bf16", gradient_bytes=2, master_bytes=2, moment_bytes=4),
    }
)


def optimizer_of(name: OptimizerName) -> Optimizer:
    """Return the optimizer of that name."""
    return _KNOWN[name]
