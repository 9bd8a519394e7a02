"""What is trained."""

from dataclasses import dataclass

from moetune.domain.model import Transformer

NUM_RANKS = 2
DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its batch.

    Args:
        sequences: of one step on each rank.
        chunk_bytes, places: of our variants with a small cache.
        limit_bytes: of a rank's memory, for the planned variant.
    """

    name: str
    transformer: Transformer
    sequences: int
    chunk_bytes: int
    places: int
    limit_bytes: int

    @property
    def tokens(self) -> int:
        """Of one step on each rank."""
        return self.sequences * self.transformer.length
