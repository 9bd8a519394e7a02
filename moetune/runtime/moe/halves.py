"""What two halves of one batch tell each other while they take turns."""

from collections.abc import Hashable

from moetune.domain.errors import InputError
from moetune.domain.training import BatchSplit


class Halves:
    """Values that one half of a batch has made and the other one asks for.

    Args:
        split: how the batch was cut.
    """

    def __init__(self, split: BatchSplit) -> None:
        self.split = split
        self._told = dict[tuple[int, Hashable], object]()
        self._in_backward = set[int]()
        self._waiting = set[int]()

    def begin_backward(self, half: int) -> None:
        """Take what a half tells again from now on as the same, computed again."""
        self._in_backward.add(half)

    def tell(self, half: int, about: Hashable, value: object) -> None:
        """Keep what a half has made.

        Raises:
            InputError: it has told that before, in one forward pass.
        """
        if (half, about) not in self._told:
            self._told[half, about] = value
        elif half not in self._in_backward:
            raise InputError(
                "half of a batch passed a layer of experts, or an attention, twice",
                "give such a model whole batches: BatchOverlap(model, loss_of)",
            )

    def told(self, half: int, about: Hashable) -> object | None:
        """Return what a half has told; None before it has."""
        return self._told.get((half, about))

    def has_told(self, half: int, kind: str) -> bool:
        """Return whether a half has told anything of a kind, (kind, …)."""
        kinds = {about[0] for one, about in self._told if one == half and isinstance(about, tuple)}
        return kind in kinds

    def forget(self, half: int, about: Hashable) -> None:
        """Let go of what nobody asks for any more."""
        self._told.pop((half, about), None)

    def begin_to_wait(self, half: int) -> None:
        """Take note of a half that cannot go on before the other has told it something.

        Raises:
            InputError: the other one waits, too.
        """
        if self._waiting:
            raise InputError(
                "the halves of a batch wait for each other",
                "both must call the same layers in the same order",
            )
        self._waiting.add(half)

    def end_waiting(self, half: int) -> None:
        """Take note that a half goes on."""
        self._waiting.discard(half)
