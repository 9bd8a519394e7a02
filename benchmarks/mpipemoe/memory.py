"""The peak of a whole training step with Adam on one rank of a CPU, states included."""

from dataclasses import dataclass

import torch

from benchmarks.mpipemoe.live import HostMemory, live_tensors
from moetune.domain.constraints import Strategy
from moetune.domain.layer import Workload
from moetune.runtime.moe.layer import MoELayer

_WARM_STEPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The peak of a step on the device, in bytes, states included.

    Args:
        live_bytes: by the allocator, with all temporaries.
        host_bytes: what a step takes of host memory.
    """

    live_bytes: int
    host_bytes: int


def measure_step(workload: Workload, degree: int, strategy: Strategy) -> Measured:
    """Return the peak of a step behind a warm one, with Adam's states there."""
    shape, dtype = workload.layer, getattr(torch, workload.dtype)
    with HostMemory() as host, live_tensors() as live:
        layer = MoELayer(
            shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k,
            activation=shape.activation, bias=False, pipeline=degree, memory_reuse=strategy,
            dtype=dtype,
        )  # fmt: skip
        # One pass over the parameters, without temporaries of their size.
        optimizer = torch.optim.Adam(layer.parameters(), lr=1e-4, fused=True)
        x = torch.randn(workload.tokens_per_rank, shape.d_model, dtype=dtype, requires_grad=True)
        grad = torch.randn(x.shape, dtype=dtype)
        for _ in range(_WARM_STEPS + 1):
            x.grad = None
            optimizer.zero_grad()
            layer(x).backward(grad)
            optimizer.step()
    return Measured(live_bytes=live.peak_bytes - host.peak_bytes, host_bytes=host.peak_bytes)
