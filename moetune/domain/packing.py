"""Documents packed into sequences: attention reads within each, and no further.

A causal kernel of documents of l_1 … l_n tokens has Σ l²/2 pairs of tokens (FlashAttention's varlen
kernels). A sequence of L tokens has L²/2. So a token reads as in a sequence of Σl²/Σl tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError

_MOST_PACKED = 20_000
"""Most documents that are packed to count padding; of a longer list every n-th by size is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Lengths of a training's documents; raises InputError for a wrong length or share.

    Args:
        mean: tokens of a document.
        attended: length of an unpacked sequence with the same attention per token, Σl²/Σl.
        useful: share of a sequence's tokens that are not padding.
        file: file of the lengths; "" where all documents have the mean length.
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
    """Return documents of `mean` tokens in full sequences; InputError if they exceed `length`."""
    if mean > length:
        raise InputError(
            f"--seq-lengths {mean} is longer than a sequence of {length}",
            "use a longer --seq", field="seq_lengths",
        )  # fmt: skip
    return Packing(mean=float(mean), attended=float(mean))


def packing_of(lengths: Sequence[int], length: int, file: str) -> Packing:
    """Return packed documents, cut to a sequence; raises InputError without any or for a 0."""
    if not lengths or min(lengths) < 1:
        raise InputError(f"{file}: a length is below 1, or there are none", field="seq_lengths")
    cut = [min(size, length) for size in lengths]
    total = sum(cut)
    return Packing(
        mean=total / len(cut), attended=sum(size * size for size in cut) / total, file=file,
        useful=_useful(cut, length),
    )  # fmt: skip


def _useful(sizes: Sequence[int], length: int) -> float:
    """Return the share of packed sequences' tokens that are not padding."""
    ordered = sorted(sizes, reverse=True)
    some = ordered[:: -(-len(ordered) // _MOST_PACKED)]
    room: list[int] = []  # tokens left in each sequence, ascending
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
