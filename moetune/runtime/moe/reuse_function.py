"""The forward pass with reused memory."""

from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.layer import Activation
from moetune.runtime.moe.executor import PipelineContext
from moetune.runtime.moe.experts import activate, hidden_room, multiply
from moetune.runtime.moe.function import ExpertGrads, SavedActivations
from moetune.runtime.moe.offload import Copy, Offload
from moetune.runtime.moe.reuse import (
    SLOTS,
    Chunks,
    Middle,
    RingShape,
    Step,
    TokenSide,
    num_travelling,
)
from moetune.runtime.moe.weights import ChunkWeights, RowWeights

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
        kept = SavedActivations.of(inputs, self._restore(chunk, inputs))
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


class ReusedExperts(torch.autograd.Function):
    """y = Σₖ weights · expert(x), as `PipelinedExperts`, in rings of two or three buffers."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        pipe: PipelineContext,
        activation: Activation,
        offload: Offload,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        w3: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (T, D)."""
        step = Step(
            pipe=pipe, activation=activation, offload=offload, top_k=weights_TK.shape[1],
            parameters=(w1, b1, w2, b2, w3),
        )  # fmt: skip
        try:
            run = Forward(step, x_TD)
            weights_R1 = RowWeights(pipe.dispatch, pipe.link).send(weights_TK, x_TD.dtype)
            pipe.account.add(weights_R1)
            y_TD = run.run(weights_R1)
        except BaseException:
            offload.end()
            raise
        ctx.pipe, ctx.activation, ctx.offload = pipe, activation, offload
        ctx.save_for_backward(
            None if offload.keeps_input else x_TD, weights_TK, weights_R1, w1, b1, w2, b2, w3
        )
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TD: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, the weights and the parameters."""
        pipe: PipelineContext = ctx.pipe
        with pipe.scratch.guard("a backward pass"):
            return _backward(ctx, grad_TD)


def _backward(
    ctx: Any,  # noqa: ANN401
    grad_TD: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    x_TD, weights_TK, weights_R1, *parameters = ctx.saved_tensors
    pipe: PipelineContext = ctx.pipe
    offload: Offload = ctx.offload
    step = Step(
        pipe=pipe, activation=ctx.activation, offload=offload, top_k=weights_TK.shape[1],
        parameters=tuple(parameters),
    )  # fmt: skip
    try:
        run = Backward(step, x_TD, grad_TD, weights_R1)
        grad_x_TD = run.run()
    finally:
        offload.end()
    grad_weights_TK = RowWeights(pipe.dispatch, pipe.link).bring_back(
        run.grad_weights_R1, weights_TK
    )
    return grad_x_TD, grad_weights_TK, None, None, None, *run.experts.totals()
