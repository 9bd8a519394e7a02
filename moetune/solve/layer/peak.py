"""Peak memory of one training step of a layer, buffer by buffer as the runtime allocates them.

`solve.layer.memory` has the formulas of MPipeMoE, which bound a strategy. This module counts all
buffers of the runtime, also those that the formulas omit. T tokens a rank, k experts a token, N
rows that are saved, M d_model, H d_hidden, E experts, E_l of them on this rank, P ranks, s bytes a
value. Rows are spread evenly over the ranks; a rank that receives more rows needs more.
"""

import math
from dataclasses import dataclass

from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Strategy
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.optimizers import Optimizer, layer_optimizer
from moetune.domain.units import FULL_BYTES, dtype_bytes

_INDEX_BYTES = 8
_DOT_VALUES = 2**25
"""Most float32 products in memory at once for the gradients of routing weights, on a GPU."""


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
        """The sum of all parts except the host's."""
        return (
            self.state_bytes + self.activation_bytes + self.buffer_bytes
            + self.ring_bytes + self.routing_bytes
        )  # fmt: skip


def peak_bytes(
    *,
    workload: Workload,
    degree: int,
    strategy: Strategy = "none",
    bias: bool = True,
    optimizer: Optimizer | None = None,
    is_grouped: bool,
) -> Peak:
    """Return the peak of a training step, forward and backward.

        reused    2·T·M (x, y) + 2·T·M (their gradients) + chunks of M and H in rings
        none      2·T·M + N·(M + H) saved, 2·T·M + T·k·M + N·M + chunks of H in buffers

    with H twice for swiglu. Grouped kernels allocate their results. So strategies that reuse memory
    have another buffer for a chunk's results. "none" has a second H for every row, by expert, from
    which one product makes a parameter's gradients. In one chunk every strategy is "none". In a
    tensor-parallel group the strategy does not matter: see `solve.layer.memory`.

    Args:
        bias: whether experts add biases (swiglu never does).
        optimizer: by default that of a single layer.
        is_grouped: whether one kernel of the device takes the rows of all local experts.
    """
    kind: type[BufferCounts] = GroupedCounts if is_grouped else BufferCounts
    if workload.expert_parallel == "tensor":
        kind = TensorParallelCounts
    counts = kind(workload, degree, strategy, bias=bias)
    states = optimizer or layer_optimizer(workload.dtype)
    return Peak(
        state_bytes=counts.parameters * round(states.total_bytes),
        activation_bytes=counts.activation_bytes(),
        buffer_bytes=counts.buffer_bytes() + counts.gradient_sum_bytes(states),
        ring_bytes=counts.ring_bytes(),
        routing_bytes=counts.routing_bytes(),
        host_bytes=counts.host_bytes(),
    )


class BufferCounts:
    """Counts of buffers for experts that compute one after another."""

    def __init__(self, workload: Workload, degree: int, strategy: Strategy, *, bias: bool) -> None:
        self._workload, self._layer, self._degree = workload, workload.layer, degree
        self._reuses = strategy != "none" and degree > 1
        self._keeps_input = self._reuses and strategy in OFFLOADS_INPUT
        self._keeps_middle = self._reuses and strategy in OFFLOADS_MIDDLE
        self._bias = bias and self._layer.activation != "swiglu"
        self._skew = workload.skew.p99
        self._element = dtype_bytes(workload.dtype)
        self._middle = middle_elements(self._layer)
        self._local_experts = workload.local_experts
        self._pairs = workload.rows
        self._rows = math.ceil(workload.rows * self._skew)
        self._sends_tokens = workload.world_size > 1 and self._local_experts > 1
        self._at_experts = min(2, self._layer.top_k) * self._sends_tokens
        """Buffers of travelling rows at the experts: for rows that arrive, and sums that leave."""
        self._sent_share = workload.sent_share
        self._travelling = self._sent(workload.rows) if workload.world_size > 1 else 0

    @property
    def parameters(self) -> int:
        """Parameters of the gate and of the local experts."""
        layer = self._layer
        return layer.num_experts * layer.d_model + self._expert_parameters

    @property
    def _expert_parameters(self) -> int:
        layer = self._layer
        biases = (layer.d_hidden + layer.d_model) * self._bias
        expert_parameters = layer.num_gemms * layer.d_hidden * layer.d_model + biases
        return expert_parameters * self._local_experts

    @property
    def _tokens_bytes(self) -> int:
        return self._workload.tokens_per_rank * self._layer.d_model * self._element

    def activation_bytes(self) -> int:
        """Return the bytes of x, y and what is saved for the backward pass."""
        if self._reuses:
            return 2 * self._tokens_bytes
        received = self._rows * (self._layer.d_model + self._middle)
        return 2 * self._tokens_bytes + received * self._element

    def buffer_bytes(self) -> int:
        """Return the bytes of the gradients of x and y, and of buffers for all rows of a phase."""
        if self._reuses:
            return 2 * self._tokens_bytes
        rows = self._travelling + self._rows + self._at_experts * self._sent(self._rows)
        return 2 * self._tokens_bytes + rows * self._layer.d_model * self._element

    def _sent(self, rows: int) -> int:
        """Return the rows that travel for a number of the experts' rows."""
        return math.ceil(round(rows * self._sent_share, 6))

    def gradient_sum_bytes(self, states: Optimizer) -> int:
        """Return the bytes of float32 sums that exceed the gradients of narrower parameters."""
        if self._element >= FULL_BYTES or self._degree == 1:
            return 0
        weight_bytes = self._layer.d_model * self._layer.d_hidden * self._element
        return max(0, FULL_BYTES - states.gradient_bytes) * self._expert_parameters + weight_bytes

    def ring_bytes(self) -> int:
        """Return the bytes of buffers for one chunk's rows, backward; forward takes no more."""
        layer, hidden = self._layer, 2 * self._layer.d_hidden
        if not self._reuses:
            return self._chunk_rows * hidden * self._element
        in_flight = 2 if self._keeps_input else 3  # received rows, rows sent again, and a combine
        rows = self._chunk_rows * (in_flight + min(3, self._degree) + 2)
        if self._sends_tokens:  # gradients, sums, x if sent again, and expanded rows
            arriving = 4 if self._keeps_input else 6
            expanded = 3 if self._keeps_input else 2
            rows = self._sent(self._chunk_rows) * (in_flight + arriving)
            rows += self._chunk_rows * expanded
        rows += self._chunk_tokens * (layer.top_k > 1)  # sums of a chunk, before they are written
        widths = self._chunk_rows * (hidden + self._middle)
        return (rows * layer.d_model + widths) * self._element

    @property
    def _chunk_tokens(self) -> int:
        return -(-self._workload.tokens_per_rank // self._degree)

    @property
    def _chunk_rows(self) -> int:
        return math.ceil(self._chunk_tokens * self._layer.top_k * self._skew)

    def routing_bytes(self) -> int:
        """Return the bytes of probabilities, weights and indices."""
        gate = max(self._element, FULL_BYTES)
        probabilities = self._workload.tokens_per_rank * self._layer.num_experts * gate
        indices = 3 + (self._layer.top_k > 1)  # of experts, pairs, rows and tokens
        saved = probabilities + self._pairs * (gate + _INDEX_BYTES * indices)
        weights = 2 * self._rows * gate  # and their gradients, at the experts
        return saved + self._pairs * gate + max(2 * weights, probabilities)

    def host_bytes(self) -> int:
        """Return the bytes of offloaded activations."""
        width = self._layer.d_model * self._keeps_input + self._middle * self._keeps_middle
        return self._rows * width * self._element


class GroupedCounts(BufferCounts):
    """Counts for grouped kernels, which allocate results and make each gradient in one product."""

    def buffer_bytes(self) -> int:
        """Return the bytes with a second H and M for every row, by expert."""
        if self._reuses:
            return super().buffer_bytes()
        layer = self._layer
        rows = self._travelling + self._rows  # plus leaving rows, by expert or by received row
        rows += self._at_experts * self._sent(self._rows) if self._sends_tokens else self._rows
        values = rows * layer.d_model + self._rows * layer.d_hidden
        if self._degree > 1:
            values += self._rows * (self._middle + layer.d_model)
        return 2 * self._tokens_bytes + values * self._element

    def gradient_sum_bytes(self, states: Optimizer) -> int:
        """Return the bytes if memory is reused; otherwise a gradient is a single product."""
        return super().gradient_sum_bytes(states) if self._reuses else 0

    def ring_bytes(self) -> int:
        """Return the bytes with the results that a kernel allocates."""
        layer, rows = self._layer, self._chunk_rows
        if self._reuses:
            made = rows * max(layer.d_model, layer.d_hidden)
            return super().ring_bytes() + made * self._element
        # Gradients of T_M and x; with gate and up in one matrix, also that of the hidden values.
        hidden = (layer.activation == "swiglu") * layer.d_hidden
        dots = min(_DOT_VALUES, rows * layer.d_hidden) * FULL_BYTES
        made = rows * (self._middle + hidden + layer.d_model) * self._element
        return max(dots + rows * layer.d_hidden * self._element, made)


class TensorParallelCounts(BufferCounts):
    """Counts of a tensor-parallel group: no rows are dispatched, and x's are gathered again."""

    def activation_bytes(self) -> int:
        """Return the bytes of x and y, and of the hidden values."""
        return self.buffer_bytes() + self._mine(1) * self._middle * self._element

    def buffer_bytes(self) -> int:
        """Return the bytes of the gradients of x and y."""
        return 2 * self._workload.tokens_per_rank * self._layer.d_model * self._element

    def ring_bytes(self) -> int:
        """Return the bytes of a chunk's rows, results, hidden values and sums, without T_M."""
        width = 2 * (self._layer.d_model + self._layer.d_hidden)
        sums = self._chunk_tokens * self._layer.d_model
        return (self._mine(self._degree) * width + sums) * self._element

    def routing_bytes(self) -> int:
        """Return the bytes of the tokens' probabilities, weights and indices."""
        gate = max(self._element, FULL_BYTES)
        return (
            self._workload.tokens_per_rank * self._layer.num_experts * gate
            + 2 * self._pairs * (gate + _INDEX_BYTES)
            + self._mine(1) * (2 * self._element + _INDEX_BYTES)
        )

    def _mine(self, degree: int) -> int:
        """Return the most rows that a rank computes in a chunk, with balanced pairs."""
        pairs = -(-self._workload.tokens_per_rank // degree) * self._layer.top_k
        return -(-pairs // self._workload.world_size)


def middle_elements(layer: LayerShape) -> int:
    """Return T_M's elements for one row: H, or 2·H for swiglu (with its gate)."""
    return layer.d_hidden * (2 if layer.activation == "swiglu" else 1)
