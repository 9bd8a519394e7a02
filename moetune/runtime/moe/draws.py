"""Random numbers of batches in turns: each has its own, though all draw from the same generators.

A checkpointed block draws the same numbers when it is computed again only where nobody has drawn
between: torch puts the generators' states back where the block begins, and in the middle of the
block the other batch has its turn.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch


class Draws:
    """The states that a batch's generators have while it has its turn.

    Args:
        states: of each generator.
    """

    def __init__(
        self, generators: Sequence[torch.Generator] = (), states: Iterable[torch.Tensor] = ()
    ) -> None:
        self._generators, self._states = generators, [*states]

    @classmethod
    def going_on(cls, generators: Sequence[torch.Generator]) -> "Draws":
        """Return those of the batch that draws what comes next."""
        return cls(generators, (one.get_state() for one in generators))

    @classmethod
    def beside(cls, generators: Sequence[torch.Generator]) -> "Draws":
        """Return those of another batch, which follow from the generators' states, and differ."""
        return cls(generators, map(_derived, generators))

    def put(self) -> None:
        """Let the batch draw."""
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    def keep(self) -> None:
        """Keep where the batch was, for its next turn."""
        self._states = [one.get_state() for one in self._generators]

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Leave the generators behind the body as this batch last had them, failed or not."""
        try:
            yield
        finally:
            self.put()


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Return the generators from which modules on devices draw, the CPU's among them."""
    gpus = {one.index for one in devices if one.type == "cuda"}
    of_gpus = enumerate(torch.cuda.default_generators)
    return [torch.default_generator, *(one for index, one in of_gpus if index in gpus)]


def _derived(generator: torch.Generator) -> torch.Tensor:
    state = generator.get_state().cpu().numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 1
    return torch.Generator(generator.device).manual_seed(seed).get_state()
