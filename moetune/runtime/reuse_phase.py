"""One phase with reused memory: what its chunks are, and in which order their steps run.

Two dispatches run ahead of the experts: more would need more buffers (MPipeMoE §III-B).
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from moetune.domain.samples import ALONE_CHUNKS
from moetune.runtime.dispatch import Order
from moetune.runtime.links import Transfer
from moetune.runtime.pipeline import Pipe, slices_of
from moetune.runtime.pipelined_experts import Slots
from moetune.runtime.recorder import Phase
from moetune.runtime.regroup import Regroup
from moetune.runtime.rings import Ring
from moetune.runtime.schedule import reuse_order


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """A ring of buffers for the largest chunk of rows that this rank sends, or receives."""

    num_slots: int
    width: int
    is_sent: bool = False


class Chunks:
    """A phase's chunks and the exchanges under way."""

    def __init__(self, pipe: Pipe, order: Order, phase: Phase, top_k: int) -> None:
        self._pipe, self._order, self._phase = pipe, order, phase
        self.degree = order.degree
        self.slots = Slots(pipe.dispatch, order)
        self.num_sent = [sum(counts) for counts in order.send_counts]
        self.num_received = [sum(counts) for counts in order.receive_counts]
        tokens_N = order.pairs_N
        if top_k > 1:
            tokens_N = order.pairs_N // top_k
            pipe.account.add(tokens_N)
        self.tokens = [tokens_N[mine] for mine in slices_of(self.num_sent)]
        self.regroups = [
            Regroup(pipe.dispatch.counts_PCL, pieces)
            for pieces in itertools.pairwise(order.chunk_pieces)
        ]
        self.changes_order = any(not one.changes_nothing for one in self.regroups)
        self._dispatching: dict[int, list[Transfer]] = {}

    def rings(
        self, shapes: Mapping[str, RingShape], like: torch.Tensor
    ) -> tuple[dict[str, Ring], dict[str, torch.Tensor]]:
        """Return the phase's rings, and the buffers of those of one buffer, by name."""
        scratch = self._pipe.scratch
        most_sent, most_received = max(self.num_sent), max(self.num_received)
        rooms = scratch.rooms(
            {
                f"{name} {slot}": (most_sent if ring.is_sent else most_received, ring.width)
                for name, ring in shapes.items()
                for slot in range(ring.num_slots)
            },
            like,
        )
        rings = {
            name: Ring(
                [rooms[f"{name} {slot}"] for slot in range(ring.num_slots)],
                poison=scratch.poison,
            )
            for name, ring in shapes.items()
        }
        return rings, {name: rooms[f"{name} 0"] for name in shapes}

    def run(self, steps: Steps, *, dispatches_first: bool) -> None:
        """Issue every chunk's steps; what was sent back last is still on its way.

        Args:
            dispatches_first: see `reuse_order`.
        """
        for step, chunk in reuse_order(self.degree, dispatches_first=dispatches_first):
            if step == "dispatch":
                steps.dispatch(chunk)
            elif step == "compute":
                for transfer in self._dispatching.pop(chunk):
                    transfer.wait()
                with self._pipe.recorder.compute(self._phase, "experts", chunk):
                    steps.compute(chunk)
            else:
                steps.combine(chunk)

    def dispatch(self, chunk: int, rows: torch.Tensor, room: torch.Tensor) -> Transfer:
        """Start sending the chunk's rows to their experts."""
        give, take = self._order.send_counts[chunk], self._order.receive_counts[chunk]
        transfer = self._exchange("dispatch", chunk, rows, room, give, take)
        self._dispatching.setdefault(chunk, []).append(transfer)
        return transfer

    def combine(self, chunk: int, rows: torch.Tensor, room: torch.Tensor) -> Transfer:
        """Start sending the chunk's results back."""
        give, take = self._order.receive_counts[chunk], self._order.send_counts[chunk]
        return self._exchange("combine", chunk, rows, room, give, take)

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
        is_alone = self.degree <= ALONE_CHUNKS
        transfer = self._pipe.link.exchange(room, rows, take, give, name, is_alone=is_alone)
        self._pipe.recorder.transfer(self._phase, step, chunk, transfer)
        return transfer
