"""Bytes of each buffer of a layer's training step on one rank, as the runtime makes them.

They depend on how experts compute: one by one, by grouped kernels, or in a
tensor-parallel group. `solve.layer.peak` adds them up.
"""

import math

from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Strategy
from moetune.domain.layer import Workload
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.memory import (
    middle_elements,
    tensor_parallel_hidden,
    tensor_parallel_rows,
    tensor_parallel_tokens,
)
from moetune.solve.runtime import FULL_BYTES, StateBytes

_INDEX_BYTES = 8
_DOT_VALUES = 2**25
"""Products of float32 that are in memory at once for the weights' gradients, on a GPU."""


class BufferCounts:
    """Counts of experts that compute one by one.

    Args:
        bias: whether experts add biases (swiglu never does).
        share: of the balanced rows that experts take.
    """

    def __init__(
        self,
        workload: Workload,
        forward_degree: int,
        backward_degree: int,
        strategy: Strategy,
        *,
        bias: bool,
        share: float,
    ) -> None:
        self._workload, self._layer = workload, workload.layer
        self._degrees = forward_degree, backward_degree
        self._reuses = strategy != "none" and max(self._degrees) > 1
        self._keeps_input = self._reuses and strategy in OFFLOADS_INPUT
        self._keeps_middle = self._reuses and strategy in OFFLOADS_MIDDLE
        self._share, self._bias = share, bias and self._layer.activation != "swiglu"
        self._skew = workload.skew.p99
        self._element = dtype_bytes(workload.dtype)
        self._middle = middle_elements(self._layer)
        self._local_experts = workload.local_experts
        self._pairs = workload.rows
        self._rows = math.ceil(workload.rows * share * self._skew)

    @property
    def parameters(self) -> int:
        """Of the gate and the local experts."""
        layer = self._layer
        return layer.num_experts * layer.d_model + self._expert_parameters

    @property
    def _expert_parameters(self) -> int:
        layer = self._layer
        biases = (layer.d_hidden + layer.d_model) * self._bias
        one = layer.num_gemms * layer.d_hidden * layer.d_model + biases
        return one * self._local_experts

    @property
    def _tokens_bytes(self) -> int:
        return self._workload.tokens_per_rank * self._layer.d_model * self._element

    def activation_bytes(self) -> int:
        """Return the bytes of x, y and what is saved for the backward pass."""
        if self._reuses:
            return 2 * self._tokens_bytes
        received = self._rows * (self._layer.d_model + self._middle)
        returned = self._pairs * self._layer.d_model
        return 2 * self._tokens_bytes + (received + returned) * self._element

    def buffer_bytes(self) -> int:
        """Return the bytes of the gradients of x and y, and of buffers for all rows of a phase."""
        if self._reuses:
            return 2 * self._tokens_bytes
        regroups = self._regroups(0) or self._regroups(1)
        rows = self._pairs + self._rows * (2 if regroups else 1)
        return 2 * self._tokens_bytes + rows * self._layer.d_model * self._element

    def gradient_sum_bytes(self, states: StateBytes) -> int:
        """Return the bytes of float32 sums beyond the gradients of narrower parameters."""
        if self._element >= FULL_BYTES or self._degrees[1] == 1:
            return 0
        one_weight = self._layer.d_model * self._layer.d_hidden * self._element
        return max(0, FULL_BYTES - states.gradient) * self._expert_parameters + one_weight

    def ring_bytes(self, *, backward: bool) -> int:
        """Return the bytes of buffers for the rows of one chunk."""
        degree, layer = self._degrees[backward], self._layer
        chunk_rows = self._chunk_rows(backward=backward)
        hidden = backward * layer.d_hidden + (layer.activation != "relu") * layer.d_hidden
        if not self._reuses:
            return chunk_rows * hidden * self._element
        at_experts = min(3, degree) + min(2, degree) if backward else 2 * min(2, degree)
        buffers = self._under_way(backward=backward) + at_experts + self._regroups(backward)
        return chunk_rows * (buffers * layer.d_model + hidden + self._middle) * self._element

    def _under_way(self, *, backward: bool) -> int:
        """Return the most exchanges, with reused memory, that were issued and not waited for."""
        degree = self._degrees[backward]
        dispatches = 1 if self._keeps_input else 2
        return dispatches + (degree > 1) if backward else min(3, degree)

    def _chunk_rows(self, *, backward: bool) -> int:
        chunk_tokens = -(-self._workload.tokens_per_rank // self._degrees[backward])
        return math.ceil(chunk_tokens * self._layer.top_k * self._share * self._skew)

    def routing_bytes(self) -> int:
        """Return the bytes of probabilities, weights and indices."""
        gate = max(self._element, FULL_BYTES)
        probabilities = self._workload.tokens_per_rank * self._layer.num_experts * gate
        orders = 1 if self._degrees[0] == self._degrees[1] else 2
        indices = 1 + orders * (2 + (self._layer.top_k > 1))  # pairs, rows and tokens of each order
        saved = probabilities + self._pairs * (gate + _INDEX_BYTES * indices)
        if not self._reuses:
            return saved + self._pairs * (gate + self._element)
        weights = 2 * self._rows * self._element
        returned = 2 * self._rows * self._element
        return saved + self._pairs * gate + max(weights + returned, probabilities)

    def host_bytes(self) -> int:
        """Return the bytes of offloaded activations."""
        width = self._layer.d_model * self._keeps_input + self._middle * self._keeps_middle
        return self._rows * width * self._element

    def _regroups(self, phase: int) -> bool:
        """Return whether rows of several experts, or pieces of a chunk, come from several ranks."""
        own, other = self._degrees[phase], self._degrees[1 - phase]
        cells = self._local_experts > 1 or own % other > 0
        return self._workload.world_size > 1 and cells


class GroupedCounts(BufferCounts):
    """Counts where grouped kernels make the results, and parameters have one product each."""

    def buffer_bytes(self) -> int:
        """Return the bytes with a second H and M of every row, by expert."""
        if self._reuses:
            return super().buffer_bytes()
        layer = self._layer
        rows = self._pairs + 2 * self._rows  # what arrives, and what leaves
        by_expert = 0
        if max(self._degrees) > 1:
            by_expert = self._rows * (self._middle + layer.d_model)
        values = rows * layer.d_model + by_expert
        return 2 * self._tokens_bytes + values * self._element

    def gradient_sum_bytes(self, states: StateBytes) -> int:
        """Return the bytes where memory is reused: elsewhere a gradient is one product, no sum."""
        return super().gradient_sum_bytes(states) if self._reuses else 0

    def ring_bytes(self, *, backward: bool) -> int:
        """Return the bytes with the results that a kernel makes anew."""
        layer = self._layer
        rows = self._chunk_rows(backward=backward)
        if self._reuses:
            made = rows * max(layer.d_model, layer.d_hidden)
            return super().ring_bytes(backward=backward) + made * self._element
        if not backward:
            hidden = (layer.activation != "relu") * layer.d_hidden
            return rows * (hidden + layer.d_model) * self._element
        # The dot products are over before the first chunk's rows are computed.
        dots = min(_DOT_VALUES, self._pairs * layer.d_model) * FULL_BYTES
        return max(dots, rows * (self._middle + layer.d_hidden + layer.d_model) * self._element)


class TensorParallelCounts(BufferCounts):
    """Counts of a tensor-parallel group: no row is dispatched, and x's are gathered again."""

    def activation_bytes(self) -> int:
        """Return the bytes of x and y, of x gathered from shards, and of the hidden values."""
        saved, _ = tensor_parallel_tokens(self._workload)
        rows = tensor_parallel_rows(self._workload, 1)
        return (saved * self._layer.d_model + rows * self._middle) * self._element

    def buffer_bytes(self) -> int:
        """Return the bytes of the gradients of x and y, with those gathered from shards."""
        _, buffered = tensor_parallel_tokens(self._workload)
        return buffered * self._layer.d_model * self._element

    def ring_bytes(self, *, backward: bool) -> int:
        """Return the bytes of a chunk's rows, their results and hidden values."""
        rows = tensor_parallel_rows(self._workload, self._degrees[backward])
        width = 2 * self._layer.d_model + tensor_parallel_hidden(self._layer, backward=backward)
        return rows * width * self._element

    def routing_bytes(self) -> int:
        """Return the bytes of the own tokens' probabilities, and of weights and indices."""
        gate, own_tokens = max(self._element, FULL_BYTES), self._workload.own_tokens
        probabilities = own_tokens * self._layer.num_experts * gate
        own_pairs = own_tokens * self._layer.top_k
        rows = tensor_parallel_rows(self._workload, 1)
        return (
            probabilities
            + (own_pairs + self._pairs) * (gate + _INDEX_BYTES)
            + rows * (2 * self._element + _INDEX_BYTES)
        )
