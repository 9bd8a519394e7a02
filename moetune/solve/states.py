"""Bytes that training keeps of one parameter: itself, its gradient and the optimizer's states."""

from dataclasses import dataclass

from moetune.domain.units import dtype_bytes

FULL_BYTES = 4
"""Of a value in full precision: float32."""
_MOMENTS = 2
"""Adam's mean and variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one parameter.

    Adam's 16 in float32 are 4 for each of parameter, gradient and both moments. Elements of two
    bytes get a master copy in float32 among the optimizer's states, and then it depends on who
    keeps the gradient (PPMoE §4.1): 16 in `of_layer`, 18 in `of_model`.

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
    def of_layer(cls, dtype: str) -> "StateBytes":
        """Return those of a layer by itself: 2 + 2 + 12 = 16 in mixed precision.

        Autograd leaves a gradient in `parameter.grad`, which has the parameter's own dtype.
        """
        return cls._mixed(dtype, gradient=dtype_bytes(dtype))

    @classmethod
    def of_model(cls, dtype: str) -> "StateBytes":
        """Return those of a layer inside a whole model: 2 + 4 + 12 = 18 in mixed precision.

        A step has several micro-batches, whose gradients add up in the master's dtype, as
        `runtime.sharded.stored` and Megatron-LM do: two-byte sums would lose the smaller ones.
        """
        return cls._mixed(dtype, gradient=max(FULL_BYTES, dtype_bytes(dtype)))

    @classmethod
    def adam(cls, dtype: str) -> "StateBytes":
        """Return those of `torch.optim.Adam` on parameters of that dtype, without a master."""
        element = dtype_bytes(dtype)
        return cls(parameter=element, gradient=element, optimizer=_MOMENTS * element)

    @classmethod
    def sgd(cls, dtype: str, *, momentum: bool = False) -> "StateBytes":
        """Return those of `torch.optim.SGD`."""
        element = dtype_bytes(dtype)
        return cls(parameter=element, gradient=element, optimizer=element * momentum)

    @classmethod
    def _mixed(cls, dtype: str, *, gradient: int) -> "StateBytes":
        element = dtype_bytes(dtype)
        full = max(FULL_BYTES, element)
        masters = int(element < full)
        return cls(parameter=element, gradient=gradient, optimizer=full * (_MOMENTS + masters))
