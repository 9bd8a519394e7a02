"""The backward pass with reused memory."""

from functools import partial

import torch

from moetune.runtime.copies import Copy
from moetune.runtime.pipelined_experts import ExpertGrads, Kept
from moetune.runtime.reuse_phase import Chunks, RingShape
from moetune.runtime.reuse_step import SLOTS, Middle, Step
from moetune.runtime.row_weights import ChunkWeights
from moetune.runtime.token_side import TokenSide, num_travelling

_LEAVING_SLOTS = 3
"""Where results leave from the buffer in which rows arrived: one arrives, one is at the
experts, one leaves."""


class Backward:
    """The backward pass: gradients overwrite what they were computed from.

    At the experts the rows' gradients overwrite those of the results, and leave from there.
    """

    def __init__(
        self,
        step: Step,
        x_TD: torch.Tensor | None,
        grad_TD: torch.Tensor,
        weights_R1: torch.Tensor,
    ) -> None:
        pipe, width = step.pipe, grad_TD.shape[1]
        self._chunks = chunks = Chunks(pipe, pipe.dispatch.backward, "backward", step.top_k)
        self._step, self._offload = step, step.offload
        self._x_TD, self._grad_TD, self._weights_R1 = x_TD, grad_TD, weights_R1
        num_travelling_slots = num_travelling(1 if x_TD is None else 2, chunks.degree)
        rings, rooms = chunks.rings(
            {
                "travelling": RingShape(num_slots=num_travelling_slots, width=width, is_sent=True),
                "grads": RingShape(num_slots=min(_LEAVING_SLOTS, chunks.degree), width=width),
                "inputs": RingShape(num_slots=min(SLOTS, chunks.degree), width=width),
                **step.shapes(chunks, backward=True),
            },
            grad_TD,
        )
        self._grads, self._inputs, self._grouped = (
            rings["grads"], rings["inputs"], rings.get("grouped")
        )  # fmt: skip
        self._middle = Middle(chunks, rings, step)
        self.experts = ExpertGrads(
            list(step.parameters), step.activation, chunks.degree, rooms, pipe.account
        )
        account = pipe.account
        self.grad_weights_R1 = account.empty("gradients", weights_R1.shape, weights_R1)
        grad_x_TD = account.empty("the gradient of x", grad_TD.shape, grad_TD).zero_()
        self._tokens = TokenSide(chunks, rings["travelling"], grad_x_TD)
        self._loading: dict[int, Copy] = {}
        self._middles: dict[int, tuple[dict[str, torch.Tensor], list[Copy]]] = {}

    def run(self) -> torch.Tensor:
        """Return the gradient of x (T, D)."""
        self._load_middle(0)
        self._chunks.run(self, dispatches_first=False)
        return self._tokens.end()

    def dispatch(self, chunk: int) -> None:
        """Send the gradients, and fetch what the experts received."""
        received = self._chunks.num_received[chunk]
        inputs = self._inputs.take(chunk, received)
        if self._x_TD is not None:
            self._tokens.send(chunk, self._x_TD, inputs)
        self._tokens.send(chunk, self._grad_TD, self._grads.take(chunk, received))
        if self._x_TD is None:  # behind the exchange, which a copy by this core would hold up
            mine = self._chunks.slots.rows[chunk]
            self._loading[chunk] = self._offload.load("input", inputs, mine)

    def compute(self, chunk: int) -> None:
        """Compute the experts' gradients in place of those that arrived."""
        chunks, num_rows = self._chunks, self._chunks.num_received[chunk]
        mine, regroup = chunks.slots.rows[chunk], chunks.regroups[chunk]
        arrived = grads = self._grads.of(chunk, num_rows)
        inputs = self._inputs.of(chunk, num_rows)
        if self._grouped is not None and not regroup.changes_nothing:
            grads = self._grouped.take(chunk, num_rows)
            if self._x_TD is not None:
                inputs, grads = regroup.by_expert(inputs, grads), inputs
            regroup.by_expert(arrived, grads)
        if chunk in self._loading:
            self._loading.pop(chunk).wait()
        kept = Kept.of(inputs, self._restore(chunk, inputs))
        weights = ChunkWeights(
            self._weights_R1[mine], self.grad_weights_R1[mine], self._step.parameters[3]
        )
        self.experts.run(
            grads, kept, chunks.slots.blocks[chunk], grads, weights,
            middle_is_free=partial(self._load_middle, chunk + 1),
        )  # fmt: skip
        if grads is not arrived:
            regroup.by_source(grads, arrived)

    def combine(self, chunk: int) -> None:
        """Send the gradients of the rows back."""
        num_rows = self._chunks.num_received[chunk]
        self._tokens.bring_back(chunk, self._grads.of(chunk, num_rows))

    def _load_middle(self, chunk: int) -> None:
        """Start loading pre-activations, if they are on the host: their room is free."""
        if self._offload.keeps_middle and chunk < self._chunks.degree:
            rooms, mine = self._middle.rooms(chunk), self._chunks.slots.rows[chunk]
            copies = [self._offload.load(name, room, mine) for name, room in rooms.items()]
            self._middles[chunk] = rooms, copies

    def _restore(self, chunk: int, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the pre-activations, for relu its result: from the host, or computed again."""
        if chunk in self._middles:
            rooms, copies = self._middles.pop(chunk)
            for copy in copies:
                copy.wait()
            return rooms
        kept = self._middle.compute(chunk, inputs)
        if self._step.activation == "relu":
            kept["pre"].relu_()
        return kept
