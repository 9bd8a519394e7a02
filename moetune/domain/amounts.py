"""Amounts by part of a decoder: parameters, or multiply-accumulates of one token."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """One number for each part of a block or a decoder, in a common unit.

    Args:
        attention: projections, softmax or state updates, and their norms and biases.
        dense: FFNs that every token passes.
        router: gates of the routed experts.
        routed: experts that a router chooses, and their latent projections.
        shared: experts that every token passes beside the routed ones.
        norms: around the parts, and residual mixing.
        embedding: token embeddings, and projections of them.
        head: the projection onto the vocabulary.
    """

    attention: float = 0
    dense: float = 0
    router: float = 0
    routed: float = 0
    shared: float = 0
    norms: float = 0
    embedding: float = 0
    head: float = 0

    def __add__(self, other: "Amounts") -> "Amounts":
        return Amounts(
            **{
                item.name: getattr(self, item.name) + getattr(other, item.name)
                for item in fields(self)
            }
        )

    def times(self, factor: float) -> "Amounts":
        """Return every amount multiplied by the factor."""
        return Amounts(**{item.name: getattr(self, item.name) * factor for item in fields(self)})

    @property
    def total(self) -> float:
        """Sum of the parts."""
        amounts: list[float] = [getattr(self, item.name) for item in fields(self)]
        return sum(amounts)


def add_up(amounts: "list[Amounts] | tuple[Amounts, ...]") -> Amounts:
    """Return the sum of the amounts, zero of none."""
    total = Amounts()
    for one in amounts:
        total += one
    return total
