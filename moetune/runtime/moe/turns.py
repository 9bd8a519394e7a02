"""Turns of batches that share a device: one computes while the other waits for the wire.

Each batch runs in a thread of its own, so that the model's code, and autograd's, stay as they are.
A batch gives its turn away where it waits for an exchange, and gets it back when the other batch
waits. Turns alternate whether or not an exchange has ended: then all ranks issue their exchanges in
the same order.

Where the host waits, the other batch computes meanwhile. Where a GPU's stream does, which has the
kernels of both, the wait is issued behind what the other batch issues meanwhile.
"""

import contextlib
import threading
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from moetune.comm.transfer import Transfer
from moetune.domain.training import BATCHES_IN_TURNS
from moetune.runtime.moe.draws import Draws
from moetune.runtime.moe.halves import Halves


class OtherBatchError(Exception):
    """The other batch has failed, and this one cannot go on."""


class Turns:
    """The alternation of two batches; the first one begins.

    Args:
        waits_on_host: a wait for an exchange blocks the host, and not a device's stream.
    """

    def __init__(self, *, waits_on_host: bool = True) -> None:
        self.waits_on_host = waits_on_host
        self._changed = threading.Condition()
        self._running = set(range(BATCHES_IN_TURNS))
        self._now = 0
        self._failed = False

    def take(self, batch: int) -> None:
        """Wait for a batch's turn.

        Raises:
            OtherBatchError: the other batch failed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self._now == batch)
            if self._failed:
                raise OtherBatchError

    def pass_on(self, batch: int) -> None:
        """Give the turn to the other batch, if it is still running."""
        with self._changed:
            others = self._running - {batch}
            if others and self._now == batch:
                self._now = others.pop()
            self._changed.notify_all()

    def has_other(self, batch: int) -> bool:
        """Return whether the other batch is still running."""
        with self._changed:
            return bool(self._running - {batch})

    def end(self, batch: int) -> None:
        """Give the turn away for good."""
        with self._changed:
            self._running.discard(batch)
        self.pass_on(batch)

    def fail(self) -> None:
        """Wake the other batch, which raises."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class BatchTurn:
    """One batch's place in the turns.

    Args:
        batch: 0 for the batch that goes first, 1 for the one that follows.
        draws: its random numbers.
        in_one_chunk: layers of experts join the chunks that they would be cut into.
        halves: where the two are halves of one batch, what they tell each other.
    """

    turns: Turns
    batch: int
    draws: Draws = field(default_factory=Draws)
    in_one_chunk: bool = False
    halves: Halves | None = None

    def during(self, transfer: Transfer) -> Transfer:
        """Return the transfer, whose wait gives the turn away."""
        return _TurnTransfer(transfer, self)

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Give the turn away while the body waits."""
        self.draws.keep()
        self.turns.pass_on(self.batch)
        yield
        self.turns.take(self.batch)
        self.draws.put()

    def tell(self, about: Hashable, value: object) -> None:
        """Tell the other half of this batch something.

        Raises:
            InputError: it was told before, in the same forward pass.
        """
        if self.halves is not None:
            self.halves.tell(self.batch, about, value)

    def ask(self, about: Hashable) -> object | None:
        """Return what the other half tells, to which the turn is given until it does.

        Returns:
            None where the other half ends without, or there is none.

        Raises:
            InputError: both halves wait for each other.
            OtherBatchError: the other half failed meanwhile.
        """
        if self.halves is None:
            return None
        while (found := self.halves.told(1 - self.batch, about)) is None:
            if not self.turns.has_other(self.batch):
                return None
            self.halves.begin_to_wait(self.batch)
            with self.given():
                pass
            self.halves.end_waiting(self.batch)
        return found


@dataclass(frozen=True, slots=True)
class _TurnTransfer:
    """A transfer beside whose wait the other batch computes."""

    transfer: Transfer
    turn: BatchTurn

    def wait(self) -> None:
        """Give the turn away and take it back, and wait meanwhile, or in a stream afterwards.

        Raises:
            CollectiveError: the collective failed.
            OtherBatchError: the other batch failed.
        """
        is_on_host = self.turn.turns.waits_on_host
        with self.turn.given():
            if is_on_host:
                self.transfer.wait()
        if not is_on_host:
            self.transfer.wait()

    def future(self) -> torch.futures.Future[object] | None:
        """Return the transfer's future."""
        return self.transfer.future()


_CURRENT: ContextVar[BatchTurn | None] = ContextVar("moetune_turn", default=None)


def current_turn() -> BatchTurn | None:
    """Return the turn of the batch that this thread runs; None where batches do not overlap."""
    return _CURRENT.get()


def current_batch() -> int:
    """Return the number of the batch that this thread runs; 0 where batches do not overlap."""
    turn = current_turn()
    return 0 if turn is None else turn.batch


@contextlib.contextmanager
def in_turn(turn: BatchTurn) -> Iterator[None]:
    """Run the body in the turns of a batch, from its first turn on; then end them, or fail them.

    Raises:
        OtherBatchError: the other batch failed.
    """
    token = _CURRENT.set(turn)
    try:
        turn.turns.take(turn.batch)
        turn.draws.put()
        yield
        turn.draws.keep()
    except BaseException:
        turn.turns.fail()
        raise
    finally:
        _CURRENT.reset(token)
        turn.turns.end(turn.batch)
