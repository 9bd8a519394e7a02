"""The order in which data-parallel ranks reduce dense gradients between the experts' exchanges.

A schedule has pieces; a queue says which of them are due. The runtime sends by this queue, and the
timeline of a step (`solve.model.program`) is played by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        return self.phase, math.inf if self.chunk is None else self.chunk


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


Position = tuple[float, float]
"""Phase and chunk of a point of the backward pass; behind a phase's last combine the chunk is ∞."""
START: Position = (AT_START, math.inf)
_AT_END: Position = (math.inf, math.inf)


class DuePiece(NamedTuple):
    """A range of the gradients: the point from which it may be sent, and its end.

    Args:
        end_bytes: gradients that must have been made.
    """

    position: Position
    end_bytes: int


class PieceQueue:
    """The pieces that are due, in their order, as a backward pass goes on.

    Args:
        num_bytes: all gradients. What the schedule leaves out is one piece at the end.

    Attributes:
        pieces: of all gradients, each byte once.
    """

    def __init__(self, schedule: GradientSchedule, num_bytes: int) -> None:
        planned = schedule.pieces
        pieces = [
            DuePiece(piece.position, piece.end_bytes)
            for piece in planned
            if piece.end_bytes < num_bytes
        ]
        last = next((one.position for one in planned if one.end_bytes >= num_bytes), _AT_END)
        self.pieces = (*pieces, DuePiece(last, num_bytes))
        self.restart()

    def restart(self) -> None:
        """Begin another backward pass."""
        self._position, self._num_sent = START, 0

    @property
    def position(self) -> Position:
        """The last point that the backward pass has come to."""
        return self._position

    @property
    def sent_bytes(self) -> int:
        """Gradients in the pieces that were due."""
        return self.pieces[self._num_sent - 1].end_bytes if self._num_sent else 0

    def reach(self, chunk: int | None) -> None:
        """Come to a chunk's experts; None for the end of a phase, behind its last combine."""
        phase, before = self._position
        self._position = phase + (before == math.inf), math.inf if chunk is None else chunk

    def due(self, made_bytes: float) -> range:
        """Return the numbers of the pieces that are to be sent now, and take them as sent.

        Args:
            made_bytes: gradients that there are, without gaps from the first; ∞ at the end of the
                backward pass.
        """
        first, at = self._num_sent, _AT_END if made_bytes == math.inf else self._position
        while self._num_sent < len(self.pieces):
            piece = self.pieces[self._num_sent]
            if piece.position > at or piece.end_bytes > made_bytes:
                break
            self._num_sent += 1
        return range(first, self._num_sent)


def default_schedule(made: Sequence[tuple[int, int]]) -> GradientSchedule:
    """Return pieces that need no timeline: behind each phase what was made before it.

    What is made behind the last phase is sent as it is made.

    Args:
        made: bytes of gradients in the order in which they are made, each with the MoE layers'
            backward phase before it; `AT_START` for none.
    """
    pieces, last, end = list[GradientPiece](), max((each for _, each in made), default=AT_START), 0
    for index, (size, phase) in enumerate(made):
        end += size
        is_last = index + 1 == len(made)
        sent = pieces[-1].end_bytes if pieces else 0
        if phase == last:
            if end > sent and (end - sent >= TAIL_BYTES or is_last):
                pieces.append(GradientPiece(phase=last, chunk=None, end_bytes=end))
        elif made[index + 1][1] != phase and end > sent:
            pieces.append(GradientPiece(phase=phase + 1, chunk=None, end_bytes=end))
    return GradientSchedule(pieces=tuple(pieces))
