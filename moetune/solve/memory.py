"""What a plan keeps on one device (MPipeMoE Eq. 1–4, PPMoE §4.1)."""

from moetune.domain.layer import Workload
from moetune.domain.plan import Memory
from moetune.domain.units import dtype_bytes

STATE_COPIES = 4
"""Parameter, gradient and Adam's two moments."""
STATE_BYTES = 4
"""Of each of the four on average; in mixed precision 2 + 2 + 4 + 4 + 4 make the same 16."""


def layer_memory(*, workload: Workload, forward_degree: int, backward_degree: int) -> Memory:
    """Return the memory of the layer when nothing is reused (strategy none).

        states       4·(E·M + 2·H·M·E_l) values, 3 for swiglu
        activations  2·T·M (T_I, T_O) + 2·N·M (T_DI, T_DO) + N·H (T_M)
        buffers      N·M + N·H in one chunk, 2·N·M + N·H in more

    with N = T·k rows. The paper's one expert per token and per device is k = E_l = 1.
    """
    pipelined = max(forward_degree, backward_degree) > 1
    tokens = workload.tokens_per_rank
    return Memory(
        strategy="none",
        state_bytes=_state_bytes(workload),
        activation_bytes=tokens * _activation_bytes_per_token(workload),
        buffer_bytes=tokens * _buffer_bytes_per_token(workload, pipelined=pipelined),
        saved_bytes=0,
        saving_ratio=0.0,
    )


def total_bytes(memory: Memory) -> int:
    """Return all bytes of the plan on one device."""
    return memory.state_bytes + memory.activation_bytes + memory.buffer_bytes


def tokens_that_fit(*, workload: Workload, limit_bytes: int, pipelined: bool) -> int:
    """Return the most tokens per rank within the limit; 0 or less when not even one fits."""
    per_token = _activation_bytes_per_token(workload)
    per_token += _buffer_bytes_per_token(workload, pipelined=pipelined)
    return (limit_bytes - _state_bytes(workload)) // per_token


def _state_bytes(workload: Workload) -> int:
    layer = workload.layer
    gate = layer.num_experts * layer.d_model
    experts = layer.num_gemms * layer.d_hidden * layer.d_model * workload.local_experts
    return STATE_COPIES * (gate + experts) * max(STATE_BYTES, dtype_bytes(workload.dtype))


def _activation_bytes_per_token(workload: Workload) -> int:
    layer = workload.layer
    elements = 2 * layer.d_model + layer.top_k * (2 * layer.d_model + layer.d_hidden)
    return elements * dtype_bytes(workload.dtype)


def _buffer_bytes_per_token(workload: Workload, *, pipelined: bool) -> int:
    layer = workload.layer
    elements = layer.top_k * ((2 if pipelined else 1) * layer.d_model + layer.d_hidden)
    return elements * dtype_bytes(workload.dtype)
