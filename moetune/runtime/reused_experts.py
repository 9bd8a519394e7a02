"""The pipelined part with reused memory: rings of buffers in the place of one for each chunk.

What a ring overwrites the backward pass gets back in one of two ways (MPipeMoE §III-D): what
the experts received (T_DI) from host memory (S1, S3) or sent again (S2, S4), and their
pre-activations (T_M) from host memory (S1, S2) or computed again (S3, S4). Neither results nor
weights are kept by the tokens' rank: see `row_weights`.

T tokens, K choices, N rows this rank sends, R rows it receives, D model width, H hidden width.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.layer import Activation
from moetune.runtime.activations import activate, hidden_room
from moetune.runtime.copies import Copy
from moetune.runtime.experts import multiply
from moetune.runtime.offload import Offload
from moetune.runtime.pipeline import Pipe
from moetune.runtime.pipelined_experts import ExpertGrads, Kept
from moetune.runtime.reuse_phase import Chunks
from moetune.runtime.row_weights import ChunkWeights, RowWeights

_SLOTS = 2
_TRAVELLING_SLOTS = 3
"""Rows leave and come back in one buffer: one leaves, one is at the experts, one comes back."""
_Parameters = tuple[torch.Tensor | None, ...]


class ReusedExperts(torch.autograd.Function):
    """y = Σₖ weights · expert(x), as `PipelinedExperts`, in rings of two or three buffers."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        pipe: Pipe,
        activation: Activation,
        offload: Offload,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        w3: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return (T, D)."""
        weights_R1 = RowWeights(pipe.dispatch, pipe.link).send(weights_TK, x_TD.dtype)
        parameters = (w1, b1, w2, b2, w3)
        top_k = weights_TK.shape[1]
        run = _Forward(pipe, activation, offload, x_TD, weights_R1, parameters, top_k)
        y_TD = run.run()
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
        x_TD, weights_TK, weights_R1, *parameters = ctx.saved_tensors
        pipe: Pipe = ctx.pipe
        offload: Offload = ctx.offload
        run = _Backward(
            pipe, ctx.activation, offload, x_TD, grad_TD.contiguous(), weights_R1,
            tuple(parameters), weights_TK.shape[1],
        )  # fmt: skip
        grad_x_TD = run.run()
        offload.end()
        grad_weights_TK = RowWeights(pipe.dispatch, pipe.link).bring_back(
            run.grad_weights_R1, weights_TK
        )
        return grad_x_TD, grad_weights_TK, None, None, None, *run.experts.totals()


class _Middle:
    """One chunk's pre-activations, in one buffer for all chunks (T_M)."""

    def __init__(self, chunks: Chunks, like: torch.Tensor, parameters: _Parameters) -> None:
        w1, self._b1, _, _, self._w3 = parameters
        assert w1 is not None  # noqa: S101 - every expert has one
        self._w1 = w1
        names = ("pre", "gate") if self._w3 is not None else ("pre",)
        self._rings = {
            name: chunks.ring(name, like, slots=1, is_sent=False, width=w1.shape[2])
            for name in names
        }
        self._chunks = chunks

    def rooms(self, chunk: int) -> dict[str, torch.Tensor]:
        """Return the chunk's rooms by name, whatever is in them."""
        rows = self._chunks.num_received[chunk]
        return {name: ring.take(chunk, rows) for name, ring in self._rings.items()}

    def compute(self, chunk: int, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return x·W₁ + b₁, and x·W₃ for swiglu, of the chunk's rows."""
        rooms, blocks = self.rooms(chunk), self._chunks.slots.blocks[chunk]
        multiply(rows, self._w1, blocks, rooms["pre"], self._b1)
        if self._w3 is not None:
            multiply(rows, self._w3, blocks, rooms["gate"])
        return rooms


class _Forward:
    """The forward pass: T_DI and T_DO have two buffers each, T_M one.

    A chunk's rows leave and come back in one buffer, since as many come back as left.
    """

    def __init__(
        self,
        pipe: Pipe,
        activation: Activation,
        offload: Offload,
        x_TD: torch.Tensor,
        weights_R1: torch.Tensor,
        parameters: _Parameters,
        top_k: int,
    ) -> None:
        self._chunks = chunks = Chunks(pipe, pipe.dispatch.forward, "forward", top_k)
        self._pipe, self._activation, self._offload = pipe, activation, offload
        self._x_TD, self._weights_R1, self._parameters = x_TD, weights_R1, parameters
        self._middle = _Middle(chunks, x_TD, parameters)
        self._travelling = chunks.ring("travelling", x_TD, slots=_TRAVELLING_SLOTS, is_sent=True)
        self._arrivals = chunks.ring("arrivals", x_TD, slots=_SLOTS, is_sent=False)
        self._departures = chunks.ring("grads", x_TD, slots=_SLOTS, is_sent=False)
        if chunks.changes_order:
            self._grouped = chunks.ring("grouped", x_TD, slots=1, is_sent=False)
        self._y_TD = torch.zeros_like(x_TD)

    def run(self) -> torch.Tensor:
        """Return (T, D)."""
        self._chunks.run(self)
        self._offload.settle_all()
        return self._y_TD

    def dispatch(self, chunk: int) -> None:
        """Gather the chunk's rows and send them."""
        self.finish(chunk - _TRAVELLING_SLOTS)
        self._offload.settle("input", chunk % _SLOTS)
        rows = self._travelling.take(chunk, self._chunks.num_sent[chunk])
        torch.index_select(self._x_TD, 0, self._chunks.tokens[chunk], out=rows)
        room = self._arrivals.take(chunk, self._chunks.num_received[chunk])
        self._chunks.dispatch(chunk, rows, room)

    def compute(self, chunk: int) -> None:
        """Compute the experts, and weight what they return."""
        chunks, num_rows = self._chunks, self._chunks.num_received[chunk]
        blocks, mine, regroup = (
            chunks.slots.blocks[chunk], chunks.slots.rows[chunk], chunks.regroups[chunk]
        )  # fmt: skip
        self.finish(chunk - _SLOTS)
        arrived, rows = self._arrivals.of(chunk, num_rows), self._arrivals.of(chunk, num_rows)
        out = departure = self._departures.take(chunk, num_rows)
        if not regroup.changes_nothing:
            self._offload.settle("input", 0)
            rows = out = self._grouped.take(chunk, num_rows)
            regroup.by_expert(arrived, rows)
        self._offload.save("input", self._input_slot(chunk), rows, mine)
        for name in ("pre", "gate"):
            self._offload.settle(name, 0)
        kept = self._middle.compute(chunk, rows)
        pre, gate = kept["pre"], kept.get("gate")
        room = hidden_room(pre, self._activation, self._pipe.scratch)
        hidden = activate(pre, gate, self._activation, room)
        for name, values in kept.items():
            self._offload.save(name, 0, values, mine)
        _, _, w2, b2, _ = self._parameters
        assert w2 is not None  # noqa: S101 - every expert has one
        if out is rows:
            self._offload.settle("input", 0)
        multiply(hidden, w2, blocks, out, b2).mul_(self._weights_R1[mine])
        if not regroup.changes_nothing:
            regroup.by_source(out, departure)

    def combine(self, chunk: int) -> None:
        """Send the results back."""
        chunks = self._chunks
        room = self._travelling.of(chunk, chunks.num_sent[chunk])
        chunks.combine(chunk, self._departures.of(chunk, chunks.num_received[chunk]), room)

    def finish(self, chunk: int) -> None:
        """Add the results to their tokens."""
        if self._chunks.came_back(chunk):
            rows = self._travelling.of(chunk, self._chunks.num_sent[chunk])
            self._y_TD.index_add_(0, self._chunks.tokens[chunk], rows)

    def _input_slot(self, chunk: int) -> int:
        return 0 if not self._chunks.regroups[chunk].changes_nothing else chunk % _SLOTS


class _Backward:
    """The backward pass: gradients overwrite what they were computed from.

    Rings of one name are one room, since only one phase runs at a time. At the experts
    the rows' gradients overwrite those of the results.
    """

    def __init__(
        self,
        pipe: Pipe,
        activation: Activation,
        offload: Offload,
        x_TD: torch.Tensor | None,
        grad_TD: torch.Tensor,
        weights_R1: torch.Tensor,
        parameters: _Parameters,
        top_k: int,
    ) -> None:
        self._chunks = chunks = Chunks(pipe, pipe.dispatch.backward, "backward", top_k)
        self._pipe, self._offload, self._parameters = pipe, offload, parameters
        self._x_TD, self._grad_TD, self._weights_R1 = x_TD, grad_TD, weights_R1
        self.experts = ExpertGrads(list(parameters), activation, chunks.degree, pipe.scratch)
        self.grad_weights_R1 = torch.empty_like(weights_R1)
        self._middle = _Middle(chunks, grad_TD, parameters)
        self._activation: Activation = activation
        self._travelling = chunks.ring("travelling", grad_TD, slots=_TRAVELLING_SLOTS, is_sent=True)
        self._grads = chunks.ring("grads", grad_TD, slots=_TRAVELLING_SLOTS, is_sent=False)
        self._inputs = chunks.ring("arrivals", grad_TD, slots=_SLOTS, is_sent=False)
        if x_TD is not None:
            self._again = chunks.ring("again", grad_TD, slots=1, is_sent=True)
        if chunks.changes_order:
            self._grouped = chunks.ring("grouped", grad_TD, slots=1, is_sent=False)
            self._grouped_inputs = chunks.ring("inputs", grad_TD, slots=1, is_sent=False)
        self._loading: dict[int, Copy] = {}
        self._grad_x_TD = torch.zeros_like(grad_TD)

    def run(self) -> torch.Tensor:
        """Return the gradient of x (T, D)."""
        self._chunks.run(self)
        return self._grad_x_TD

    def dispatch(self, chunk: int) -> None:
        """Send the gradients, and fetch what the experts received."""
        chunks, tokens = self._chunks, self._chunks.tokens[chunk]
        self.finish(chunk - _TRAVELLING_SLOTS)
        sent, received = chunks.num_sent[chunk], chunks.num_received[chunk]
        inputs = self._inputs.take(chunk, received)
        if self._x_TD is not None:
            chunks.has_left(chunk - 1)
            rows = torch.index_select(self._x_TD, 0, tokens, out=self._again.take(chunk, sent))
            chunks.dispatch(chunk, rows, inputs)
        else:
            mine = chunks.slots.rows[chunk]
            self._loading[chunk] = self._offload.load("input", inputs, mine)
        rows = torch.index_select(self._grad_TD, 0, tokens, out=self._travelling.take(chunk, sent))
        chunks.dispatch(chunk, rows, self._grads.take(chunk, received))

    def compute(self, chunk: int) -> None:
        """Compute the experts' gradients in place of those that arrived."""
        chunks, num_rows = self._chunks, self._chunks.num_received[chunk]
        blocks, mine, regroup = (
            chunks.slots.blocks[chunk], chunks.slots.rows[chunk], chunks.regroups[chunk]
        )  # fmt: skip
        arrived = grads = self._grads.of(chunk, num_rows)
        inputs = self._inputs.of(chunk, num_rows)
        if not regroup.changes_nothing:
            grads = regroup.by_expert(arrived, self._grouped.take(chunk, num_rows))
            if self._x_TD is not None:
                inputs = regroup.by_expert(inputs, self._grouped_inputs.take(chunk, num_rows))
        if chunk in self._loading:
            self._loading.pop(chunk).wait()
        kept = Kept.of(inputs, self._restore(chunk, inputs, mine))
        weights = ChunkWeights(
            self._weights_R1[mine], self.grad_weights_R1[mine], self._parameters[3]
        )
        self.experts.run(grads, kept, blocks, grads, weights)
        if grads is not arrived:
            regroup.by_source(grads, arrived)

    def combine(self, chunk: int) -> None:
        """Send the gradients of the rows back, where the gradients of the results came from."""
        chunks = self._chunks
        room = self._travelling.of(chunk, chunks.num_sent[chunk])
        chunks.combine(chunk, self._grads.of(chunk, chunks.num_received[chunk]), room)

    def finish(self, chunk: int) -> None:
        """Add the gradients to their tokens."""
        if self._chunks.came_back(chunk):
            rows = self._travelling.of(chunk, self._chunks.num_sent[chunk])
            self._grad_x_TD.index_add_(0, self._chunks.tokens[chunk], rows)

    def _restore(self, chunk: int, inputs: torch.Tensor, mine: slice) -> dict[str, torch.Tensor]:
        """Return the pre-activations, for relu its result: from the host, or computed again."""
        if self._offload.keeps_middle:
            rooms = self._middle.rooms(chunk)
            for copy in [self._offload.load(name, room, mine) for name, room in rooms.items()]:
                copy.wait()
            return rooms
        kept = self._middle.compute(chunk, inputs)
        if self._activation == "relu":
            kept["pre"].relu_()
        return kept
