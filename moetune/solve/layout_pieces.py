"""Parts of a transformer with their costs, as the search over layouts adds them up."""

from dataclasses import dataclass

from moetune.domain.costs import Estimate
from moetune.domain.model_plan import PartName
from moetune.solve.predict import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One part of a block, or of the first or the last stage."""

    name: PartName
    forward: Estimate
    backward: Estimate

    @property
    def seconds(self) -> float:
        """Both passes."""
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """Everything but the experts.

    Args:
        attention: what each block has before its network.
        ffn: a dense network.
        first, last: what the first and the last stage have besides.
    """

    attention: tuple[Piece, ...]
    ffn: tuple[Piece, ...]
    first: tuple[Piece, ...]
    last: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoePieces:
    """One MoE layer at its best degrees."""

    step: StepTime
    pieces: tuple[Piece, ...]
