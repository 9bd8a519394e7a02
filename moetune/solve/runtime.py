"""The runtime that a plan is made for: features that change its costs, and bytes of its states."""

from dataclasses import dataclass
from functools import cache

from moetune.domain.units import dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRuntime:
    """Features in which training runtimes differ; the defaults are moetune's own.

    A plan's numbers hold for the runtime that it is made for. `benchmarks/ppmoe` describes the
    one of PPMoE's Table 2 (Megatron-LM with DeepSpeed's ZeRO) and compares the search with it.

    Args:
        hidden_gradients: share of the gradients' collectives that computation hides; None for what
            moetune's buckets hide of them.
        splits_sends: whether each tensor-parallel rank sends its share of the activations that
            all of them have, and the next stage gathers them, as Megatron-LM does; in moetune
            every rank sends all of them.
        shards_gradients: whether ZeRO shards gradients besides optimizer states, as DeepSpeed's
            second stage does, and so reduces them after each micro-batch.
        exchanges_under_tensor: whether MoE layers exchange tokens under tensor-parallel groups,
            all of whose ranks send the same tokens and have a share of each expert's hidden
            width, as PPMoE's DPMoE does; moetune refuses to.
        is_unfused: whether attention keeps its scores, and the loss its logits in float32, too,
            as Megatron-LM did before attention was one kernel (Korthikanti et al. 2022, Eq. 1).
        shards_in_chunks: whether replicas of whole models shard all states in chunks, as moetune
            does; else ZeRO shards optimizer states alone.
    """

    hidden_gradients: float | None = None
    splits_sends: bool = False
    shards_gradients: bool = False
    exchanges_under_tensor: bool = False
    is_unfused: bool = False
    shards_in_chunks: bool = True


MOETUNE = TargetRuntime()


FULL_BYTES = 4
"""A value in full precision: float32."""
_MOMENTS = 2
"""Adam's mean and variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one parameter with its gradient and optimizer states.

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
    @cache  # a plan asks for them for each peak
    def of_layer(cls, dtype: str) -> "StateBytes":
        """Return those in a single layer: 2 + 2 + 12 = 16 in mixed precision.

        Autograd leaves a gradient in `parameter.grad`, which has the parameter's own dtype.
        """
        return cls._mixed(dtype, gradient=dtype_bytes(dtype))

    @classmethod
    def of_model(cls, dtype: str) -> "StateBytes":
        """Return those in a whole model: 2 + 4 + 12 = 18 in mixed precision.

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
    def _mixed(cls, dtype: str, *, gradient: int) -> "StateBytes":
        element = dtype_bytes(dtype)
        full = max(FULL_BYTES, element)
        masters = int(element < full)
        return cls(parameter=element, gradient=gradient, optimizer=full * (_MOMENTS + masters))
