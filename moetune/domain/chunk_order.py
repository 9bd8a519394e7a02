"""What a training step needs of the chunks, and when: the recorded order that plans them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One module's need for chunks, at its forward or its backward.

    An order is the uses of one training step, forward then backward.

    Args:
        chunks: indices into the packed chunks; fused ones never appear.
        leaves: chunks that are reduced after this use and leave the cache.
        seconds: what the module computes in this use, for the planner.
    """

    chunks: tuple[int, ...]
    leaves: tuple[int, ...] = ()
    seconds: float = 0.0
