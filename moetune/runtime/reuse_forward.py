"""The forward pass with reused memory."""

import torch

from moetune.runtime.activations import activate, hidden_room
from moetune.runtime.experts import multiply
from moetune.runtime.reuse_phase import Chunks, RingShape
from moetune.runtime.reuse_step import SLOTS, Middle, Step
from moetune.runtime.token_side import TokenSide

_TRAVELLING_SLOTS = 3
"""One leaves, one is on its way back, and the next ones take turns without waiting for it."""


class Forward:
    """The forward pass: T_DI and T_DO have two buffers each on either side, T_M one.

    All buffers are made here, before the first exchange.
    """

    def __init__(self, step: Step, x_TD: torch.Tensor) -> None:
        pipe, width = step.pipe, x_TD.shape[1]
        self._chunks = chunks = Chunks(pipe, pipe.dispatch.forward, "forward", step.top_k)
        self._step, self._offload, self._x_TD = step, step.offload, x_TD
        slots = min(SLOTS, chunks.degree)
        rings, self._rooms = chunks.rings(
            {
                "travelling": RingShape(
                    num_slots=min(_TRAVELLING_SLOTS, chunks.degree), width=width, is_sent=True
                ),
                "arrivals": RingShape(num_slots=slots, width=width),
                "departures": RingShape(num_slots=slots, width=width),
                **step.shapes(chunks, backward=False),
            },
            x_TD,
        )
        self._arrivals, self._departures = rings["arrivals"], rings["departures"]
        self._grouped = rings.get("grouped")
        self._middle = Middle(chunks, rings, step)
        y_TD = pipe.account.empty("the results", x_TD.shape, x_TD).zero_()
        self._tokens = TokenSide(chunks, rings["travelling"], y_TD)

    def run(self, weights_R1: torch.Tensor) -> torch.Tensor:
        """Return (T, D)."""
        self._weights_R1 = weights_R1
        self._chunks.run(self, dispatches_first=True)
        y_TD = self._tokens.end()
        self._offload.settle_all()
        return y_TD

    def dispatch(self, chunk: int) -> None:
        """Send the chunk's rows."""
        self._offload.settle("input", chunk % SLOTS)
        room = self._arrivals.take(chunk, self._chunks.num_received[chunk])
        self._tokens.send(chunk, self._x_TD, room)

    def compute(self, chunk: int) -> None:
        """Compute the experts, and weight what they return."""
        chunks, num_rows = self._chunks, self._chunks.num_received[chunk]
        mine, regroup = chunks.slots.rows[chunk], chunks.regroups[chunk]
        arrived = rows = self._arrivals.of(chunk, num_rows)
        out: torch.Tensor | None = None
        input_slot = chunk % SLOTS
        if self._grouped is not None and not regroup.changes_nothing:
            input_slot = 0
            self._offload.settle("input", input_slot)
            rows = out = self._grouped.take(chunk, num_rows)
            regroup.by_expert(arrived, rows)
        self._offload.save("input", input_slot, rows, mine)
        hidden = self._hidden(chunk, rows)
        if out is not None:
            self._offload.settle("input", input_slot)
        self._tokens.settle(chunk - SLOTS)
        departure = self._departures.take(chunk, num_rows)
        out = departure if out is None else out
        _, _, w2, b2, _ = self._step.parameters
        assert w2 is not None  # noqa: S101 - every expert has one
        multiply(hidden, w2, chunks.slots.blocks[chunk], out, b2).mul_(self._weights_R1[mine])
        if out is rows:
            regroup.by_source(out, departure)

    def combine(self, chunk: int) -> None:
        """Send the results back."""
        num_rows = self._chunks.num_received[chunk]
        self._tokens.bring_back(chunk, self._departures.of(chunk, num_rows))

    def _hidden(self, chunk: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden values of the chunk; the pre-activations leave for the host."""
        for name in ("pre", "gate"):
            self._offload.settle(name, 0)
        kept = self._middle.compute(chunk, rows)
        pre, gate = kept["pre"], kept.get("gate")
        room = hidden_room(pre, self._step.activation, self._rooms)
        hidden = activate(pre, gate, self._step.activation, room)
        for name, values in kept.items():
            self._offload.save(name, 0, values, self._chunks.slots.rows[chunk])
        return hidden
