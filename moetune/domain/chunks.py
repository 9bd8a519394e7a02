"""Chunks of model states, and the order in which a training step uses them (Elixir)."""

from dataclasses import dataclass

FEWEST_PLACES = 2
"""Smallest number of chunks that a cache holds."""


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
    """The chunks that a module needs in its forward or its backward pass.

    An order is the uses of one training step, forward then backward.

    Args:
        chunks: numbers of the chunks in the model.
        leaves: chunks that are reduced after this use and leave the cache.
    """

    chunks: tuple[int, ...]
    leaves: tuple[int, ...] = ()
