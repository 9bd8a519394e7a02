"""Documents packed into sequences: attention reads within each, and no further.

A causal kernel of documents of l_1 … l_n tokens has Σ l²/2 pairs of tokens (FlashAttention's varlen
kernels). A sequence of L of them has L²/2. So a token reads as in a sequence of Σl²/Σl.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError

_MOST_PACKED = 20_000
"""Documents that are packed to see what is left empty; of more every n-th by size is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Lengths of the documents of a training; InputError of a length below 1, or no share.

    Args:
        mean: tokens of a document.
        attended: tokens of the sequence in which a token would read as much, Σl²/Σl.
        useful: share of a sequence's tokens that documents have.
        file: of the lengths; "" where all documents have the mean.
    """

    mean: float
    attended: float
    useful: float = field(default=1.0, metadata=UNLESS_DEFAULT)
    file: str = field(default="", metadata=UNLESS_DEFAULT)

    @property
    def flags(self) -> dict[str, object]:
        """The lengths as `seq_lengths` of a question."""
        return {"seq_lengths": self.file or str(round(self.mean))}

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.attended * (1 + 1e-9) or not 0 < self.useful <= 1:
            raise InputError(f"documents of {self.mean:g} tokens cannot be packed", "use 1 or more")


def packing_of_mean(mean: int, length: int) -> Packing:
    """Return documents of so many tokens in full sequences; InputError if these are shorter."""
    if mean > length:
        raise InputError(
            f"--seq-lengths {mean} is longer than a sequence of {length}",
            "use a longer --seq", field="seq_lengths",
        )  # fmt: skip
    return Packing(mean=float(mean), attended=float(mean))


def packing_of(lengths: Sequence[int], length: int, file: str) -> Packing:
    """Return packed documents, cut to a sequence; InputError without any, or a length below 1."""
    if not lengths or min(lengths) < 1:
        raise InputError(f"{file}: a length is below 1, or there are none", field="seq_lengths")
    cut = [min(size, length) for size in lengths]
    total = sum(cut)
    return Packing(
        mean=total / len(cut), attended=sum(size * size for size in cut) / total, file=file,
        useful=_useful(cut, length),
    )  # fmt: skip


def _useful(sizes: Sequence[int], length: int) -> float:
    """Return the share of the tokens of packed sequences that documents have."""
    ordered = sorted(sizes, reverse=True)
    some = ordered[:: -(-len(ordered) // _MOST_PACKED)]
    room: list[int] = []  # that sequences have left, ascending
    num = 0
    for size in some:
        place = bisect_left(room, size)
        if place == len(room):
            num += 1
            left = length - size
        else:
            left = room.pop(place) - size
        insort(room, left)
    return sum(some) / (num * length)
