"""One phase with reused memory: what its chunks are, and in which order their steps run.

Two dispatches run ahead of the experts, and one combine behind them: more would need more
buffers (MPipeMoE §III-B).
"""

import itertools
from typing import Protocol

import torch

from moetune.runtime.dispatch import Order
from moetune.runtime.links import Transfer
from moetune.runtime.pipeline import Pipe, slices_of
from moetune.runtime.pipelined_experts import Slots
from moetune.runtime.recorder import Phase
from moetune.runtime.regroup import Regroup
from moetune.runtime.rings import Ring
from moetune.runtime.schedule import issue_order


class Steps(Protocol):
    """What a phase does with a chunk."""

    def dispatch(self, chunk: int) -> None:
        """Send its rows."""
        ...

    def compute(self, chunk: int) -> None:
        """Compute on what arrived."""
        ...

    def combine(self, chunk: int) -> None:
        """Send its results back."""
        ...

    def finish(self, chunk: int) -> None:
        """Add what came back to the tokens."""
        ...


class Chunks:
    """A phase's chunks and the exchanges under way."""

    def __init__(self, pipe: Pipe, order: Order, phase: Phase, top_k: int) -> None:
        self._pipe, self._order, self._phase = pipe, order, phase
        self.degree = order.degree
        self.slots = Slots(pipe.dispatch, order)
        self.num_sent = [sum(counts) for counts in order.send_counts]
        self.num_received = [sum(counts) for counts in order.receive_counts]
        self.tokens = [
            order.pairs_N[mine] if top_k == 1 else order.pairs_N[mine] // top_k
            for mine in slices_of(self.num_sent)
        ]
        self.regroups = [
            Regroup(pipe.dispatch.counts_PCL, pieces)
            for pieces in itertools.pairwise(order.chunk_pieces)
        ]
        self.changes_order = any(not one.changes_nothing for one in self.regroups)
        self._dispatching: dict[int, list[Transfer]] = {}
        self._combining: dict[int, Transfer] = {}

    def ring(
        self, name: str, like: torch.Tensor, *, slots: int, is_sent: bool, width: int = 0
    ) -> Ring:
        """Return a ring for chunks of rows that this rank sends, or receives.

        Args:
            width: of the rows; default, that of `like`.
        """
        return Ring(
            self._pipe.scratch,
            name,
            slots=min(slots, self.degree),
            rows=max(self.num_sent if is_sent else self.num_received),
            like=like,
            width=width or like.shape[1],
        )

    def run(self, steps: Steps) -> None:
        """Run every chunk's steps, and finish what is still on its way."""
        for step, chunk in issue_order(self.degree, "interleaved"):
            if step == "dispatch":
                steps.dispatch(chunk)
            elif step == "compute":
                for transfer in self._dispatching.pop(chunk):
                    transfer.wait()
                with self._pipe.recorder.compute(self._phase, "experts", chunk):
                    steps.compute(chunk)
            else:
                steps.combine(chunk)
        for chunk in sorted(self._combining):
            steps.finish(chunk)

    def dispatch(self, chunk: int, rows: torch.Tensor, room: torch.Tensor) -> None:
        """Start sending the chunk's rows to their experts."""
        give, take = self._order.send_counts[chunk], self._order.receive_counts[chunk]
        transfer = self._exchange("dispatch", chunk, rows, room, give, take)
        self._dispatching.setdefault(chunk, []).append(transfer)

    def has_left(self, chunk: int) -> None:
        """Wait until the first rows that the chunk sent have left their buffer."""
        for transfer in self._dispatching.get(chunk, ())[:1]:
            transfer.wait()

    def combine(self, chunk: int, rows: torch.Tensor, room: torch.Tensor) -> None:
        """Start sending the chunk's results back."""
        give, take = self._order.receive_counts[chunk], self._order.send_counts[chunk]
        self._combining[chunk] = self._exchange("combine", chunk, rows, room, give, take)

    def came_back(self, chunk: int) -> bool:
        """Wait for the chunk's results; False where they were waited for before."""
        transfer = self._combining.pop(chunk, None)
        if transfer is not None:
            transfer.wait()
        return transfer is not None

    def _exchange(
        self,
        step: str,
        chunk: int,
        rows: torch.Tensor,
        room: torch.Tensor,
        give: tuple[int, ...],
        take: tuple[int, ...],
    ) -> Transfer:
        name = f"{self._phase} {step} {chunk + 1} of {self.degree}"
        # Two dispatches are in flight at most: no queue in which gloo's own would be faster.
        transfer = self._pipe.link.exchange(room, rows, take, give, name, is_alone=True)
        self._pipe.recorder.transfer(self._phase, step, chunk, transfer)
        return transfer
