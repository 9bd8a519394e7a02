"""The order in which data-parallel ranks reduce dense gradients between the experts' exchanges."""

from dataclasses import dataclass

from moetune.domain.errors import InputError

AT_START = -1
"""The phase of pieces that go before any MoE layer's backward phase."""
TAIL_BYTES = 4 * 2**20
"""Of a piece behind the last exchange: sent as its gradients are made, because none is delayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPiece:
    """A range of the dense gradients, and the earliest point of the backward pass to send it.

    It begins where the piece before it ends, and is sent once the backward pass has come to that
    point and has made all of its gradients.

    Args:
        phase: the MoE layer's backward phase, counted from 0 in the order in which they run;
            `AT_START` for none.
        chunk: before the experts of this chunk; None behind the phase's last combine.
        end_bytes: end of the range among all dense gradients, in the order in which the backward
            pass makes them.
    """

    phase: int
    chunk: int | None
    end_bytes: int

    @property
    def position(self) -> tuple[int, float]:
        """The point of the backward pass, in an order that tuples compare by."""
        return self.phase, float("inf") if self.chunk is None else self.chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSchedule:
    """The pieces in the order in which every rank sends them; the rest goes at the end.

    Raises:
        InputError: pieces are empty, or not in the order of the backward pass.
    """

    pieces: tuple[GradientPiece, ...] = ()

    def __post_init__(self) -> None:
        position, end = (AT_START, 0.0), 0
        for piece in self.pieces:
            if piece.end_bytes <= end:
                raise InputError(
                    f"a piece of gradients ends at byte {piece.end_bytes}, the one before at {end}"
                )
            if piece.position < position:
                raise InputError(
                    f"the piece of gradients that ends at byte {piece.end_bytes} comes before its "
                    "predecessor in the backward pass"
                )
            position, end = piece.position, piece.end_bytes
