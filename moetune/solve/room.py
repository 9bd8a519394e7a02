"""What fits into a device's memory: which strategies, degrees and numbers of tokens."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layer import Workload
from moetune.domain.plan import Memory
from moetune.domain.plan_inputs import PlanInputs, Strategy
from moetune.domain.units import format_bytes
from moetune.solve.memory import layer_memory, tokens_that_fit, total_bytes

MEMORY_TAKEN = "memory-taken"
"""Among a plan's constraints: bytes of the limit that the rest of the model takes."""
_MOST_TOKENS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A layer and the memory it may take on one device."""

    workload: Workload
    limit_bytes: int

    @property
    def shrinks_with_chunks(self) -> bool:
        """Whether chunks take less memory than one without reuse: in a tensor-parallel group."""
        return self.workload.expert_parallel == "tensor"

    def least_degree(self, largest: int) -> int:
        """Return the degree that takes the least memory without reuse."""
        return largest if self.shrinks_with_chunks else 1

    @property
    def max_pipelined_tokens(self) -> int:
        """The most tokens whose buffers fit in several chunks without reuse; may be negative."""
        return tokens_that_fit(workload=self.workload, limit_bytes=self.limit_bytes, pipelined=True)

    def memory(
        self, *, strategy: Strategy, degrees: tuple[int, int], tokens: int | None = None
    ) -> Memory:
        """Return what a choice takes, for the workload's tokens or for others."""
        workload = self.workload
        if tokens is not None:
            workload = replace(workload, tokens_per_rank=tokens)
        return layer_memory(
            workload=workload,
            forward_degree=degrees[0],
            backward_degree=degrees[1],
            strategy=strategy,
        )

    def fits(
        self, *, strategy: Strategy, degrees: tuple[int, int], tokens: int | None = None
    ) -> bool:
        """Return whether a choice fits."""
        memory = self.memory(strategy=strategy, degrees=degrees, tokens=tokens)
        return total_bytes(memory) <= self.limit_bytes

    def fewest_chunks(self, *, strategy: Strategy, tokens: int, largest: int) -> int:
        """Return the smallest degree, the same in both phases, that fits; else `largest`.

        More chunks take less memory, so that the degrees can be bisected.
        """

        def fits(degree: int) -> bool:
            return self.fits(strategy=strategy, degrees=(degree, degree), tokens=tokens)

        return min(1 + bisect_left(range(1, largest + 1), True, key=fits), largest)  # noqa: FBT003

    def most_tokens(self, *, strategy: Strategy, degrees: tuple[int, int]) -> int:
        """Return the most tokens per rank that fit; 0 when not even one does."""

        def is_too_large(tokens: int) -> bool:
            return not self.fits(strategy=strategy, degrees=degrees, tokens=tokens)

        return bisect_left(range(1, _MOST_TOKENS), True, key=is_too_large)  # noqa: FBT003


def limit_of(inputs: PlanInputs, *, device_memory_bytes: int) -> int:
    """Return what the layer may take: the limit, else the device, less what others take.

    Raises:
        InfeasiblePlanError: others take all of it.
    """
    limit = inputs.memory_limit_bytes
    limit = device_memory_bytes if limit is None else limit
    taken = taken_bytes(inputs.constraints)
    if taken and taken >= limit:
        raise InfeasiblePlanError(
            f"memory binds: the rest of the model takes {format_bytes(taken)} of "
            f"{format_bytes(limit)}, which leaves nothing for the layer",
            "spread the model over more ranks, or allow more memory",
        )
    return limit - taken


def taken_bytes(constraints: Mapping[str, str]) -> int:
    """Return how much of the limit the rest of the model takes."""
    return int(constraints.get(MEMORY_TAKEN, "0"))
