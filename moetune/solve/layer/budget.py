"""The memory that a layer's plan has to fit into: the peak of a step as the layer runs it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from moetune.domain.constraints import Strategy
from moetune.domain.layer import Workload
from moetune.domain.plan import Memory
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.peak import Peak, has_grouped, peak_bytes

Degrees = tuple[int, int]
"""Chunks forward and backward."""
MOST_TOKENS = 2**40
FEW_CHUNKS = 3
"""Rings have buffers for three chunks at most: from there on more chunks take less memory."""


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
        return cls(
            workload=workload,
            limit_bytes=limit_bytes,
            is_grouped=has_grouped(workload, costs),
        )

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

    def most_tokens(self, *, strategy: Strategy, degrees: Degrees, below: int = MOST_TOKENS) -> int:
        """Return the most tokens per rank that fit, fewer than `below`; 0 when not even one does.

        A peak grows with the tokens, and nearly in proportion: what is guessed from two of them is
        seldom off by more than the tokens that a chunk is rounded up by.
        """

        def spare_bytes(tokens: int) -> int:
            peak = self.peak(strategy=strategy, degrees=degrees, tokens=tokens)
            return self.limit_bytes - peak.device_bytes

        return _last_not_negative(spare_bytes, most=below - 1)

    def most_tokens_from(self, degree: int, *, strategy: Strategy, largest: int) -> int:
        """Return the most tokens for which any two degrees from `degree` to `largest` fit."""
        few = range(degree, min(degree + FEW_CHUNKS, largest) + 1)
        pairs = [(one, other) for one in few for other in few]
        most = MOST_TOKENS
        for degrees in pairs:
            if most and not self.fits(strategy=strategy, degrees=degrees, tokens=most):
                most = self.most_tokens(strategy=strategy, degrees=degrees, below=most)
        return most


def _last_not_negative(falling: Callable[[int], int], *, most: int) -> int:
    """Return the last of 1 to `most` where a falling function is not negative; 0 without any.

    The line through both ends of the interval gives the next guess (regula falsi). Guesses that
    keep landing on one side are moved by steps that double; once the interval is no longer than
    the step, it is halved.
    """
    low, high = 1, most
    at_low, at_high = falling(low), falling(high)
    if at_low < 0 or at_high >= 0:
        return 0 if at_low < 0 else most
    reach, was_low = 0, None
    while high - low > 1:
        guess = low + (high - low) * at_low // (at_low - at_high)
        guess += reach if was_low else -reach
        if high - low <= reach:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        found = falling(guess)
        is_low = found >= 0
        if is_low:
            low, at_low = guess, found
        else:
            high, at_high = guess, found
        reach = max(2 * reach, 1) if is_low is was_low else reach
        was_low = is_low
    return low
