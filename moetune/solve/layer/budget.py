"""The memory that a layer's plan has to fit into: the peak of a step as the layer runs it."""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Self

from moetune.domain.constraints import Strategy
from moetune.domain.layer import Workload
from moetune.domain.plan import Memory
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.peak import Peak, peak_bytes

Degrees = tuple[int, int]
"""Chunks forward and backward."""
MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """A layer, and the bytes that the peak of its step may take on one device.

    Args:
        is_grouped: one kernel of the device takes the rows of all local experts.
    """

    workload: Workload
    limit_bytes: int
    is_grouped: bool = False

    @classmethod
    def of(cls, *, workload: Workload, costs: LayerCosts, limit_bytes: int) -> Self:
        """Return the budget of a layer that runs as its costs are measured."""
        is_gpu = costs.costs.copy_mode == "pinned"
        is_grouped = workload.dtype == "bfloat16" and is_gpu
        return cls(workload=workload, limit_bytes=limit_bytes, is_grouped=is_grouped)

    @property
    def keeps_all(self) -> bool:
        """Whether no memory is reused: in a tensor-parallel group."""
        return self.workload.expert_parallel == "tensor"

    def peak(self, *, strategy: Strategy, degrees: Degrees, tokens: int | None = None) -> Peak:
        """Return the peak of a step, for the workload's tokens or for others."""
        workload = self.workload
        if tokens is not None and tokens != workload.tokens_per_rank:
            workload = replace(workload, tokens_per_rank=tokens)
        return peak_bytes(
            workload=workload,
            forward_degree=degrees[0],
            backward_degree=degrees[1],
            strategy=strategy,
            is_grouped=self.is_grouped,
        )

    def memory(self, *, strategy: Strategy, degrees: Degrees) -> Memory:
        """Return the memory of a choice by the papers' formulas, with its peak."""
        memory = layer_memory(
            workload=self.workload,
            forward_degree=degrees[0],
            backward_degree=degrees[1],
            strategy=strategy,
        )
        peak = self.peak(strategy=strategy, degrees=degrees)
        return replace(memory, peak_bytes=peak.device_bytes)

    def fits(self, *, strategy: Strategy, degrees: Degrees, tokens: int | None = None) -> bool:
        """Return whether the peak of a choice is within the limit."""
        peak = self.peak(strategy=strategy, degrees=degrees, tokens=tokens)
        return peak.device_bytes <= self.limit_bytes

    def most_tokens(self, *, strategy: Strategy, degrees: Degrees) -> int:
        """Return the most tokens per rank that fit, as a peak grows with them; 0 for none."""
        return bisect_left(
            range(1, MOST_TOKENS), True,  # noqa: FBT003 - looked for, no switch
            key=lambda tokens: not self.fits(strategy=strategy, degrees=degrees, tokens=tokens),
        )  # fmt: skip
