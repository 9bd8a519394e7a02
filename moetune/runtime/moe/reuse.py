"""A few buffers that the chunks of one phase take in turn (MPipeMoE §III-D)."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from moetune.domain.layer import Activation, Phase
from moetune.domain.samples import ALONE_CHUNKS
from moetune.runtime.links import Transfer
from moetune.runtime.moe.dispatch import Order, Regroup
from moetune.runtime.moe.executor import PipelineContext, slices_of
from moetune.runtime.moe.experts import hidden_shapes, multiply
from moetune.runtime.moe.function import ChunkLayout
from moetune.runtime.moe.offload import Offload
from moetune.runtime.moe.schedule import reuse_order


class Ring:
    """Buffers of one kind. A chunk's buffer is its own until a chunk takes the same slot.

    Args:
        buffers: (rows of the largest chunk, width) each.
        poison: fill a buffer with NaN when it is taken.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], *, poison: bool) -> None:
        self._buffers, self._poison = buffers, poison

    @property
    def num_slots(self) -> int:
        """Number of buffers."""
        return len(self._buffers)

    def take(self, chunk: int, rows: int) -> torch.Tensor:
        """Return the chunk's buffer anew: (rows, width), whatever was in it."""
        buffer = self._buffers[chunk % len(self._buffers)]
        if self._poison:
            buffer.fill_(torch.nan)
        return buffer[:rows]

    def of(self, chunk: int, rows: int) -> torch.Tensor:
        """Return the buffer that the chunk took."""
        return self._buffers[chunk % len(self._buffers)][:rows]


class Rotation:
    """A ring that one use after another takes; each waits for the one it takes over from."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._num_uses = 0
        self._endings: dict[int, Callable[[], None]] = {}

    def take(self, rows: int) -> torch.Tensor:
        """Return the next buffer, once its last use has ended."""
        self.finish(self._num_uses - self._ring.num_slots)
        buffer = self._ring.take(self._num_uses, rows)
        self._num_uses += 1
        return buffer

    def until(self, ending: Callable[[], None]) -> int:
        """Say what waits for the end of the use that began last; return its number."""
        self._endings[self._num_uses - 1] = ending
        return self._num_uses - 1

    def finish(self, use: int) -> None:
        """Wait for the end of a use, if it has not ended yet."""
        ending = self._endings.pop(use, None)
        if ending is not None:
            ending()

    def end(self) -> None:
        """End every use, in the order of their beginnings."""
        for use in sorted(self._endings):
            self.finish(use)


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

    def __init__(self, pipe: PipelineContext, order: Order, phase: Phase, top_k: int) -> None:
        self._pipe, self._order, self._phase = pipe, order, phase
        self.degree = order.degree
        self.slots = ChunkLayout(pipe.dispatch, order)
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


Parameters = tuple[torch.Tensor | None, ...]
SLOTS = 2
"""Of a ring at the experts: rows of one chunk arrive, or leave, beside those at the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What both phases of a step share."""

    pipe: PipelineContext
    activation: Activation
    offload: Offload
    top_k: int
    parameters: Parameters

    @property
    def w1(self) -> torch.Tensor:
        """The first matrices of the experts (L, D, H)."""
        w1 = self.parameters[0]
        assert w1 is not None  # noqa: S101 - every expert has one
        return w1

    def shapes(self, chunks: Chunks, *, backward: bool) -> dict[str, RingShape]:
        """Return the rooms of hidden width for one chunk (T_M), and what regrouping needs."""
        width, d_hidden = self.w1.shape[1:]
        names = ["pre"] if self.parameters[4] is None else ["pre", "gate"]
        names += hidden_shapes(self.activation, 0, d_hidden, backward=backward)
        shapes = dict.fromkeys(names, RingShape(num_slots=1, width=d_hidden))
        if chunks.changes_order:
            shapes["grouped"] = RingShape(num_slots=1, width=width)
        return shapes


class Middle:
    """One chunk's pre-activations, in one buffer for all chunks (T_M)."""

    def __init__(self, chunks: Chunks, rings: dict[str, Ring], step: Step) -> None:
        self._chunks, self._step = chunks, step
        self._rings = {name: rings[name] for name in ("pre", "gate") if name in rings}

    def rooms(self, chunk: int) -> dict[str, torch.Tensor]:
        """Return the chunk's rooms by name, whatever is in them."""
        rows = self._chunks.num_received[chunk]
        return {name: ring.take(chunk, rows) for name, ring in self._rings.items()}

    def compute(self, chunk: int, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return x·W₁ + b₁, and x·W₃ for swiglu, of the chunk's rows."""
        rooms, blocks = self.rooms(chunk), self._chunks.slots.blocks[chunk]
        _, b1, _, _, w3 = self._step.parameters
        multiply(rows, self._step.w1, blocks, rooms["pre"], b1)
        if w3 is not None:
            multiply(rows, w3, blocks, rooms["gate"])
        return rooms


class TokenSide:
    """Sends tokens' rows and adds what comes back, in one rotation of buffers for both.

    A buffer more than a chunk has dispatches is enough where combines go first, and the link
    never waits for it. The next chunk's rows take the place of those that the experts wait for
    anyway, while the results of the chunk before are on the link; results take the place of
    earlier results or of rows at the experts, while the next chunk's rows are on the link.

    Args:
        sum_TD: (T, D), zeros; what comes back is added here.
    """

    def __init__(self, chunks: Chunks, ring: Ring, sum_TD: torch.Tensor) -> None:
        self._chunks, self._rotation, self._sum_TD = chunks, Rotation(ring), sum_TD
        self._use_of: dict[int, int] = {}

    def send(self, chunk: int, values_TD: torch.Tensor, room: torch.Tensor) -> None:
        """Send the chunk's rows of `values_TD`; what arrives here goes to `room`."""
        rows = self._rotation.take(self._chunks.num_sent[chunk])
        torch.index_select(values_TD, 0, self._chunks.tokens[chunk], out=rows)
        self._rotation.until(self._chunks.dispatch(chunk, rows, room).wait)

    def bring_back(self, chunk: int, results: torch.Tensor) -> None:
        """Send the experts' results back."""
        rows = self._rotation.take(self._chunks.num_sent[chunk])
        transfer = self._chunks.combine(chunk, results, rows)
        self._use_of[chunk] = self._rotation.until(partial(self._add, chunk, rows, transfer))

    def settle(self, chunk: int) -> None:
        """Wait until the chunk's results are back, and so have left the experts' buffer."""
        if chunk in self._use_of:
            self._rotation.finish(self._use_of.pop(chunk))

    def end(self) -> torch.Tensor:
        """Return the sum, with everything that was under way."""
        self._rotation.end()
        return self._sum_TD

    def _add(self, chunk: int, rows: torch.Tensor, transfer: Transfer) -> None:
        transfer.wait()
        self._sum_TD.index_add_(0, self._chunks.tokens[chunk], rows)


def num_travelling(num_dispatches: int, degree: int) -> int:
    """Return the buffers of the rotation, for that many dispatches a chunk."""
    return num_dispatches + (degree > 1)
