"""Bytes of a layer's states: parameters, gradients, and what the optimizer keeps."""

from dataclasses import dataclass
from functools import cache

from moetune.domain.units import dtype_bytes

FULL_BYTES = 4
"""A value in full precision: float32."""
_MOMENTS = 2
"""Adam's mean and variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one parameter with its gradient and optimizer states.

    Adam's 16 in float32 are 4 for each of parameter, gradient and both moments. Elements of two
    bytes get a master copy in float32 among the optimizer's states: 16 again, in a single layer.

    Args:
        optimizer: moments, and the master copy where there is one.
    """

    parameter: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameter + self.gradient + self.optimizer

    @classmethod
    @cache  # a plan asks for them for each peak
    def of_layer(cls, dtype: str) -> "StateBytes":
        """Return those in a single layer: 2 + 2 + 12 = 16 in mixed precision.

        Autograd leaves a gradient in `parameter.grad`, which has the parameter's own dtype.
        """
        element = dtype_bytes(dtype)
        full = max(FULL_BYTES, element)
        masters = int(element < full)
        return cls(parameter=element, gradient=element, optimizer=full * (_MOMENTS + masters))

    @classmethod
    def adam(cls, dtype: str) -> "StateBytes":
        """Return those of `torch.optim.Adam` on parameters of that dtype, without a master."""
        element = dtype_bytes(dtype)
        return cls(parameter=element, gradient=element, optimizer=_MOMENTS * element)
