"""How close reused memory comes to MPipeMoE's bound (Eq. 6, Fig. 10), on one rank of a CPU.

The models are those of Table III with both widths divided by four, and one local expert, as
the paper has it. Measured is a whole training step with Adam, states included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.mpipemoe.live import live_tensors
from moetune.domain.constraints import Strategy
from moetune.domain.layer import Activation, LayerShape, Workload
from moetune.runtime.moe.layer import MoELayer
from moetune.solve.layer.memory import layer_memory, total_bytes
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.runtime import StateBytes

MODELS = {"GPT-S/4": (192, 768), "GPT-XL/4": (512, 2048), "BERT-L/4": (256, 1024)}
TOKENS = (4096, 8192, 16384, 32768)
DEGREES = (2, 4, 8)
STRATEGIES: tuple[Strategy, ...] = ("S1", "S2", "S3", "S4")
_WARM_STEPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The peak of a step on the device, in bytes, states included.

    Args:
        account_bytes: by the layer's account, with the states and the caller's tensors.
        live_bytes: by the allocator, with all temporaries.
        host_bytes: what the layer keeps of host memory.
    """

    account_bytes: int
    live_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model, batch, degree and strategy.

    Args:
        bound_bytes: states + 2 · activations − 2Δ (Eq. 4 to 6).
        predicted_bytes: of `moetune.solve.layer.peak`.
        unsaved_bytes: states + 2 · activations, what Eq. 6 compares with.
        none: strategy none in as many chunks, measured.
    """

    model: str
    tokens: int
    degree: int
    strategy: Strategy
    measured: Measured
    bound_bytes: int
    predicted_bytes: int
    unsaved_bytes: int
    none: Measured

    @property
    def share_of_bound(self) -> float:
        """Saving over that of Eq. 6, both against the formula of strategy none."""
        saved = self.unsaved_bytes - self.measured.live_bytes
        return saved / (self.unsaved_bytes - self.bound_bytes)

    @property
    def share_against_none(self) -> float:
        """Saving against the measured strategy none, which needs less than its formula."""
        saved = self.none.live_bytes - self.measured.live_bytes
        return saved / (self.unsaved_bytes - self.bound_bytes)


def measure_table(
    *,
    models: Sequence[str] = tuple(MODELS),
    tokens: Sequence[int] = TOKENS,
    degrees: Sequence[int] = DEGREES,
    strategies: Sequence[Strategy] = STRATEGIES,
    activation: Activation = "relu",
) -> Iterator[Row]:
    """Measure every combination, one row after another."""
    for model in models:
        for num_tokens in tokens:
            d_model, d_hidden = MODELS[model]
            layer = LayerShape(
                d_model=d_model, d_hidden=d_hidden, num_experts=1, activation=activation
            )
            workload = Workload(layer=layer, world_size=1, tokens_per_rank=num_tokens)
            for degree in degrees:
                none = measure_step(workload, degree, "none")
                for strategy in strategies:
                    yield _row(model, workload, degree, strategy, none)


def measure_step(workload: Workload, degree: int, strategy: Strategy) -> Measured:
    """Return the peak of a step behind a warm one, with Adam's states there."""
    shape, dtype = workload.layer, getattr(torch, workload.dtype)
    with live_tensors() as live:
        layer = MoELayer(
            shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k,
            activation=shape.activation, bias=False, pipeline=degree, memory_reuse=strategy,
            dtype=dtype,
        )  # fmt: skip
        # One pass over the parameters, without temporaries of their size.
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-4, fused=True)
        x = torch.randn(workload.tokens_per_rank, shape.d_model, dtype=dtype, requires_grad=True)
        grad = torch.randn(x.shape, dtype=dtype)
        for step in range(_WARM_STEPS + 1):
            if step == _WARM_STEPS:
                layer.reset_peak_memory()
            x.grad = None
            optimizer.zero_grad()
            layer(x).backward(grad)
            optimizer.step()
        use = layer.memory
        held = [x, grad, *layer.parameters(), *_tensors_of(optimizer)]
        account_bytes = use.peak_device_bytes + sum(each.nbytes for each in held)
    host_bytes = use.peak_host_bytes
    return Measured(
        account_bytes=account_bytes,
        live_bytes=live.peak_bytes - host_bytes,
        host_bytes=host_bytes,
    )


def _row(model: str, workload: Workload, degree: int, strategy: Strategy, none: Measured) -> Row:
    def formula(strategy: Strategy) -> int:
        memory = layer_memory(
            workload=workload, forward_degree=degree, backward_degree=degree, strategy=strategy
        )
        return total_bytes(memory)

    peak = peak_bytes(
        workload=workload, forward_degree=degree, backward_degree=degree, strategy=strategy,
        bias=False, states=StateBytes.adam(workload.dtype),
    )  # fmt: skip
    return Row(
        model=model,
        tokens=workload.tokens_per_rank,
        degree=degree,
        strategy=strategy,
        measured=measure_step(workload, degree, strategy),
        bound_bytes=formula(strategy),
        predicted_bytes=peak.device_bytes,
        unsaved_bytes=formula("none"),
        none=none,
    )


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
