"""Peak memory of one training step of a layer, buffer by buffer as the runtime makes them.

`solve.layer.memory` has the formulas of MPipeMoE, which bound a strategy; this recounts the
runtime's own buffers, with those beyond the formulas. T tokens a rank, k experts a token, N rows
that are saved, M d_model, H d_hidden, E experts, E_l of them on this rank, P ranks, s bytes a
value. Rows are spread evenly over the ranks; a rank that receives more of them needs more.
"""

from dataclasses import dataclass

from moetune.domain.constraints import Strategy
from moetune.domain.layer import Workload
from moetune.domain.units import pinned_bytes
from moetune.solve.layer.buffers import (
    BufferCounts,
    GroupedCounts,
    TensorParallelCounts,
)
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.runtime import StateBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes at the peak of a training step on one rank, by purpose.

    Args:
        state_bytes: parameters, gradients and optimizer states.
        activation_bytes: x, y and what is saved for the backward pass.
        buffer_bytes: the gradients of x and y, and buffers for all rows of a phase.
        ring_bytes: buffers for the rows of one chunk.
        routing_bytes: probabilities, weights and indices.
        host_bytes: offloaded activations.
    """

    state_bytes: int
    activation_bytes: int
    buffer_bytes: int
    ring_bytes: int
    routing_bytes: int
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        """All but the host's."""
        return (
            self.state_bytes + self.activation_bytes + self.buffer_bytes
            + self.ring_bytes + self.routing_bytes
        )  # fmt: skip


def peak_bytes(
    *,
    workload: Workload,
    forward_degree: int,
    backward_degree: int,
    strategy: Strategy = "none",
    bias: bool = True,
    capacity_factor: float | None = None,
    states: StateBytes | None = None,
    pins_host: bool = False,
    is_grouped: bool = False,
) -> Peak:
    """Return the peak of a training step, forward and backward.

        reused    2·T·M (x, y) + 2·T·M (their gradients) + chunks of M and H in rings
        none      2·T·M + N·(M + H) + T·k·M saved, 2·T·M + T·k·M + N·M + chunks of H in buffers

    with H twice for swiglu. Grouped kernels make their results anew: strategies that reuse memory
    have one more of a chunk's, and "none" has a second H for every row, by expert, from which the
    gradients of the parameters are one product. In one chunk, forward and backward, every strategy
    is "none". In a tensor-parallel group strategy and capacity do not matter: see
    `solve.layer.memory`.

    Args:
        bias: whether experts add biases (swiglu never does).
        capacity_factor: as the layer's; above 1 it drops nothing of balanced rows.
        states: of one parameter; default, those of a layer by itself.
        pins_host: host memory is page-locked.
        is_grouped: one kernel of the device takes the rows of all local experts.
    """
    kind: type[BufferCounts] = GroupedCounts if is_grouped else BufferCounts
    if workload.expert_parallel == "tensor":
        kind = TensorParallelCounts
    share = 1.0 if capacity_factor is None else capacity_factor
    counts = kind(
        workload, forward_degree, backward_degree, strategy, bias=bias,
        share=min(1.0, share),
    )  # fmt: skip
    return _peak(counts, states or StateBytes.of_layer(workload.dtype), pins_host=pins_host)


def _peak(counts: BufferCounts, states: StateBytes, *, pins_host: bool) -> Peak:
    return Peak(
        state_bytes=counts.parameters * states.total,
        activation_bytes=counts.activation_bytes(),
        buffer_bytes=counts.buffer_bytes() + counts.gradient_sum_bytes(states),
        ring_bytes=max(counts.ring_bytes(backward=backward) for backward in (False, True)),
        routing_bytes=counts.routing_bytes(),
        host_bytes=pinned_bytes(counts.host_bytes()) if pins_host else counts.host_bytes(),
    )


def has_grouped(workload: Workload, costs: LayerCosts) -> bool:
    """Return whether the layer may run grouped kernels: in bfloat16, on a GPU."""
    return workload.dtype == "bfloat16" and costs.costs.copy_mode == "pinned"
