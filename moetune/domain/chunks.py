"""Chunks of model states, and the order in which a training step uses them (Elixir)."""

from dataclasses import dataclass

FEWEST_PLACES = 2
"""Chunks that a cache has room for at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Model states in chunks (Elixir)."""

    chunk_bytes: int
    cache_bytes: int
    scatter: bool
    offload: bool
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One module's need for chunks, at its forward or its backward.

    An order is the uses of one training step, forward then backward.

    Args:
        chunks: their numbers in the model.
        leaves: chunks that are reduced after this use and leave the cache.
    """

    chunks: tuple[int, ...]
    leaves: tuple[int, ...] = ()
