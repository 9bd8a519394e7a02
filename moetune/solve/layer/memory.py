"""Memory of one layer by the papers' formulas (MPipeMoE Eq. 1–6, PPMoE §4.1), and its budget.

T tokens a rank, k experts a token, N = T·k rows, M d_model, H d_hidden, E experts, E_l of them
on this rank, n chunks. The paper has k = E_l = 1 and H = 4·M.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Self

from moetune.domain.constraints import Strategy
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import Workload
from moetune.domain.optimizers import layer_optimizer
from moetune.domain.plan import Memory
from moetune.domain.request import PlanInputs
from moetune.domain.units import dtype_bytes, format_bytes
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.peak import (
    BufferCounts,
    Peak,
    TensorParallelCounts,
    middle_elements,
    peak_bytes,
)


def layer_memory(*, workload: Workload, degree: int, strategy: Strategy = "none") -> Memory:
    """Return the memory of the layer.

        states       E·M + 2·H·M·E_l parameters, 3 for swiglu, of `layer_optimizer`'s bytes each
        activations  2·T·M (T_I, T_O) + 2·N·M (T_DI, T_DO) + N·H (T_M; twice for swiglu)
        buffers      N·M + T_M in one chunk, as large as the activations in more
        Δ(n)         N·2M·(n − 2)/n + T_M·(n − 1)/n, less in activations and in buffers

    Strategies that reuse memory save Δ(n): they have two buffers each for T_DI and T_DO, and one
    for T_M. All of them save the same: nothing in one chunk, only T_M in two. The formulas omit
    rings that hide transfers (a few chunks of M) and routing data (8 bytes a row): see
    `solve.layer.peak`.

    A tensor-parallel group of P ranks dispatches nothing and reuses nothing:

        activations  2·T·M (T_I, T_O) + N/P·H (T_M; twice for swiglu)
        buffers      2·T·M (their gradients) + one chunk's rows and results, 2·M and H of each;
                     backward H once more, and for relu H once less
    """
    is_tensor, saved = workload.expert_parallel == "tensor", 0
    kind = TensorParallelCounts if is_tensor else BufferCounts
    counts = kind(workload, degree, strategy, bias=False)
    if is_tensor:
        activations = counts.activation_bytes()
        buffers = counts.buffer_bytes() + counts.ring_bytes()
    else:
        layer, element = workload.layer, dtype_bytes(workload.dtype)
        middle = middle_elements(layer)
        activations = 2 * workload.tokens_per_rank * layer.d_model * element
        activations += workload.rows * (2 * layer.d_model + middle) * element
        buffers = activations if degree > 1 else workload.rows * (layer.d_model + middle) * element
        if strategy != "none" and degree > 1:
            reused = 2 * layer.d_model * (degree - 2) + middle * (degree - 1)
            saved = workload.tokens_per_rank * element * (layer.top_k * reused // degree)
    state_bytes = counts.parameters * round(layer_optimizer(workload.dtype).total_bytes)
    return Memory(
        strategy="none" if is_tensor else strategy,
        state_bytes=state_bytes,
        activation_bytes=activations - saved,
        buffer_bytes=buffers - saved,
        saved_bytes=2 * saved,
        saving_ratio=2 * saved / (state_bytes + activations + buffers),
    )


def limit_of(inputs: PlanInputs, *, device_memory_bytes: int) -> int:
    """Return the layer's memory without `memory-taken`; InfeasiblePlanError if none is left."""
    limit = inputs.memory_limit_bytes
    limit = device_memory_bytes if limit is None else limit
    taken = inputs.pinned.memory_taken_bytes
    if taken and taken >= limit:
        raise InfeasiblePlanError(
            f"memory binds: the rest of the model takes {format_bytes(taken)} of "
            f"{format_bytes(limit)}, which leaves nothing for the layer",
            "spread the model over more ranks, or allow more memory",
        )
    return limit - taken


MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A layer, and the bytes that the peak of its step may take on one device."""

    workload: Workload
    limit_bytes: int
    is_grouped: bool

    @classmethod
    def of(cls, *, workload: Workload, costs: LayerCosts, limit_bytes: int) -> Self:
        """Return the budget of a layer with the kernel kind that its costs were measured with."""
        is_gpu = costs.costs.copy_mode == "pinned"
        is_grouped = workload.dtype == "bfloat16" and is_gpu
        if workload.kernel:
            is_grouped = workload.kernel != "loop"
        return cls(workload=workload, limit_bytes=limit_bytes, is_grouped=is_grouped)

    @property
    def keeps_all(self) -> bool:
        """Whether no memory is reused, as in a tensor-parallel group."""
        return self.workload.expert_parallel == "tensor"

    def peak(self, *, strategy: Strategy, degree: int, tokens: int | None = None) -> Peak:
        """Return the peak of a step with `tokens` per rank, by default the workload's."""
        workload = self.workload
        if tokens is not None and tokens != workload.tokens_per_rank:
            workload = replace(workload, tokens_per_rank=tokens)
        return peak_bytes(
            workload=workload, degree=degree, strategy=strategy, is_grouped=self.is_grouped
        )

    def memory(self, *, strategy: Strategy, degree: int) -> Memory:
        """Return the memory of a choice by the papers' formulas, together with its peak."""
        memory = layer_memory(workload=self.workload, degree=degree, strategy=strategy)
        peak = self.peak(strategy=strategy, degree=degree)
        return replace(memory, peak_bytes=peak.device_bytes)

    def fits(self, *, strategy: Strategy, degree: int, tokens: int | None = None) -> bool:
        """Return whether the peak of a choice is within the limit."""
        peak = self.peak(strategy=strategy, degree=degree, tokens=tokens)
        return peak.device_bytes <= self.limit_bytes

    def most_tokens(self, *, strategy: Strategy, degree: int) -> int:
        """Return the largest number of tokens per rank that fits; 0 if none fits."""
        return bisect_left(
            range(1, MOST_TOKENS), True,  # noqa: FBT003 - looked for, no switch
            key=lambda tokens: not self.fits(strategy=strategy, degree=degree, tokens=tokens),
        )  # fmt: skip
