"""Reuse a few buffers for all chunks: the memory policies S1 to S4 (MPipeMoE §III-D).

A token's way to the wire: `layer`, `gate`, `function`, `executor`, **reuse**, `comm`.

The rows that experts receive (T_DI) and return (T_DO) have two buffers each at the experts, the
pre-activations (T_M) one. For the backward pass a strategy loads T_DI and T_M from the host, or
sends T_DI again and computes T_M again.

T tokens, K choices, R rows this rank receives, D model width.
"""

from functools import partial

import torch

from moetune.comm.transfer import Transfer, Wait
from moetune.domain.layer import Phase
from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.executor import (
    DispatchedPhase,
    PhaseInputs,
    PipelineContext,
    pipelined_schedule,
    ring_schedule,
)
from moetune.runtime.moe.experts import SavedActivations
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.offload import Offload
from moetune.runtime.moe.rings import Ring, TokenExchange, make_rings

_AT_EXPERTS = 2
"""Buffers at the experts: one chunk's rows arrive, or leave, while another's are computed."""
_TRAVELLING = 3
"""Buffers at the tokens, forward: one chunk's rows leave, another's results come back, and the
third lets the next dispatch go first (see `ring_schedule`)."""
_LEAVING = 3
"""Buffers of gradients at the experts, backward, where results leave from the buffer in which rows
arrived: one arrives, one is computed, one leaves. The forward's schedule would need a fourth."""


def reuse_buffers(context: PipelineContext, dispatch: Dispatch, offload: Offload) -> MemoryPolicy:
    """Return the policy whose chunks take a few buffers in turn.

    Args:
        offload: copies to the host and back what the strategy does not restore otherwise.
    """
    return MemoryPolicy(
        context=context, dispatch=dispatch, forward=partial(_ReuseForward, offload),
        backward=partial(_ReuseBackward, offload), release=offload.end,
    )  # fmt: skip


class _ReusePhase(DispatchedPhase):
    """The common part of both phases: chunks, rings, and the one buffer for pre-activations."""

    def __init__(self, phase: Phase, offload: Offload, inputs: PhaseInputs) -> None:
        super().__init__(phase, inputs)
        self._offload = offload
        self._num_received = list(map(sum, inputs.dispatch.counts.receive_CP))

    def _make_rings(self, num_travelling: int, at_experts: dict[str, int]) -> dict[str, Ring]:
        """Return the phase's rings, all made at once.

        Args:
            num_travelling: number of buffers at the tokens.
            at_experts: numbers of buffers at the experts, by kind.
        """
        degree, width = self._dispatch.degree, self._values_TD.shape[1]
        most_sent, most = max(map(sum, self._dispatch.counts.send_CP)), max(self._num_received)
        hidden = {name: (most, wide) for name, wide in self._experts.saved_widths.items()}
        hidden |= self._experts.hidden_shapes(most, backward="grads" in at_experts)
        shapes = {"travelling": (num_travelling, most_sent, width)}
        shapes |= {name: (min(num, degree), most, width) for name, num in at_experts.items()}
        shapes |= {name: (1, *shape) for name, shape in hidden.items()}
        if self._places_R is not None:
            shapes["grouped"] = (1, most, width)
        rings = make_rings(self._context.workspace, shapes, self._values_TD)
        self._buffers = {name: rings[name].whole for name in hidden}
        self._hidden_rings = {name: rings[name] for name in ("pre", "gate") if name in rings}
        return rings

    def _take_saved(self, chunk: int) -> SavedActivations:
        """Return the buffers for the chunk's pre-activations, uninitialised."""
        rows = self._num_received[chunk]
        taken = {name: ring.take(chunk, rows) for name, ring in self._hidden_rings.items()}
        return SavedActivations(pre_RH=taken["pre"], gate_RH=taken.get("gate"))

    def _project_up(self, chunk: int, rows: torch.Tensor) -> SavedActivations:
        """Return the pre-activations of the chunk's rows."""
        saved = self._take_saved(chunk)
        self._experts.project_up(rows, saved, self._dispatch.parts[chunk])
        return saved

    def _by_expert(self, chunk: int, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the chunk's rows, given by source, by expert."""
        assert self._places_R is not None  # noqa: S101 - asked before
        return torch.index_select(
            rows, 0, self._places_R[self._dispatch.parts[chunk].rows], out=out
        )

    def _by_source(self, chunk: int, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the chunk's rows, given by expert, by source."""
        assert self._places_R is not None  # noqa: S101 - asked before
        return out.index_copy_(0, self._places_R[self._dispatch.parts[chunk].rows], rows)


class _ReuseForward(_ReusePhase):
    """The forward phase; all of its buffers are made before the first exchange."""

    def __init__(self, offload: Offload, inputs: PhaseInputs) -> None:
        super().__init__("forward", offload, inputs)
        degree, x_TD = self._dispatch.degree, inputs.values_TD
        self.schedule = ring_schedule(degree)
        at_experts = {"arrivals": _AT_EXPERTS, "departures": _AT_EXPERTS}
        self._rings = self._make_rings(min(_TRAVELLING, degree), at_experts)
        y_TD = self._tracker.empty("the results", x_TD.shape, x_TD)
        self._tokens = TokenExchange(self._dispatch, self._rings["travelling"], y_TD)

    def begin(self) -> None:
        """Send the combine weights, which the experts apply."""
        self.send_weights()

    def finish(self) -> torch.Tensor:
        """Return (T, D)."""
        y_TD = self._tokens.finish()
        self._offload.wait_for_saves()
        self.saved = None if self._offload.offloads_input else self._values_TD, self._weights_R1
        return y_TD

    def dispatch(self, chunk: int) -> None:
        """Send the chunk's rows."""
        self._offload.wait_for_save("input", chunk % _AT_EXPERTS)
        arrival = self._rings["arrivals"].take(chunk, self._num_received[chunk])
        self._tokens.dispatch(self, chunk, self._values_TD, arrival)

    def compute(self, chunk: int) -> None:
        """Compute the experts on the rows that arrived."""
        if chunk == 0:
            self._weights_R1 = self.arrived_weights()
        num_rows, part = self._num_received[chunk], self._dispatch.parts[chunk]
        arrived = rows = self._rings["arrivals"].of(chunk, num_rows)
        input_buffer = chunk % _AT_EXPERTS
        is_grouped = self._places_R is not None
        if is_grouped:
            input_buffer = 0  # whose last save ended before the last chunk's results
            rows = self._rings["grouped"].take(chunk, num_rows)
            self._by_expert(chunk, arrived, rows)
        self._offload.save("input", input_buffer, rows, part.rows)
        hidden = self._hidden(chunk, rows)
        if is_grouped:  # the results overwrite the rows, whose copy to the host must have ended
            self._offload.wait_for_save("input", input_buffer)
        # Only now: the results in that buffer travel during the up-projection.
        self._tokens.wait_for(chunk - _AT_EXPERTS)
        departure = self._rings["departures"].take(chunk, num_rows)
        out = rows if is_grouped else departure
        self._experts.project_down(hidden, self._weights_R1[part.rows], out, part)
        if is_grouped:
            self._by_source(chunk, out, departure)

    def combine(self, chunk: int) -> None:
        """Send the results back."""
        departure = self._rings["departures"].of(chunk, self._num_received[chunk])
        self._tokens.combine(self, chunk, departure)

    def _hidden(self, chunk: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden values of the chunk, and offload the pre-activations."""
        for name in ("pre", "gate"):
            self._offload.wait_for_save(name, 0)
        saved, mine = self._project_up(chunk, rows), self._dispatch.parts[chunk].rows
        hidden = self._experts.activate(saved, self._buffers["hidden"])
        self._offload.save("pre", 0, saved.pre_RH, mine)
        if saved.gate_RH is not None:
            self._offload.save("gate", 0, saved.gate_RH, mine)
        return hidden


class _ReuseBackward(_ReusePhase):
    """The backward phase: the rows' gradients overwrite those of the results."""

    def __init__(self, offload: Offload, inputs: PhaseInputs) -> None:
        super().__init__("backward", offload, inputs)
        self._x_TD, weights_R1 = inputs.saved
        grad_TD, degree = inputs.values_TD, self._dispatch.degree
        self.schedule = pipelined_schedule(degree, "interleaved")
        # A buffer more than a chunk has dispatches: see `TokenExchange`.
        num_travelling = (1 if self._x_TD is None else 2) + (degree > 1)
        at_experts = {"grads": _LEAVING, "inputs": _AT_EXPERTS}
        self._rings = self._make_rings(num_travelling, at_experts)
        tracker = self._tracker
        self.grads = self.expert_grads(inputs, weights_R1, self._buffers)
        grad_x_TD = tracker.empty("the gradient of x", grad_TD.shape, grad_TD)
        self._tokens = TokenExchange(self._dispatch, self._rings["travelling"], grad_x_TD)
        self._returning: Transfer
        self._loading_inputs: dict[int, Wait] = {}
        self._loading_saved: dict[int, tuple[SavedActivations, list[Wait]]] = {}

    def begin(self) -> None:
        """Start loading the first chunk's pre-activations."""
        self._load_saved(0)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x and of the weights."""
        grad_x_TD = self._tokens.finish()
        self._returning.wait()
        return grad_x_TD, self._weights.returned(self._weights_TK)

    def dispatch(self, chunk: int) -> None:
        """Send the gradients, and get the experts' inputs back: by the wire or from the host."""
        received = self._num_received[chunk]
        inputs = self._rings["inputs"].take(chunk, received)
        if self._x_TD is not None:
            self._tokens.dispatch(self, chunk, self._x_TD, inputs)
        self._tokens.dispatch(
            self, chunk, self._values_TD, self._rings["grads"].take(chunk, received)
        )
        if self._x_TD is None:  # after the exchange: on a CPU the copy takes the caller's time
            mine = self._dispatch.parts[chunk].rows
            self._loading_inputs[chunk] = self._offload.load("input", inputs, mine)

    def compute(self, chunk: int) -> None:
        """Compute the experts' gradients in place of those that arrived."""
        num_rows, part = self._num_received[chunk], self._dispatch.parts[chunk]
        arrived = grads = self._rings["grads"].of(chunk, num_rows)
        inputs = self._rings["inputs"].of(chunk, num_rows)
        if self._places_R is not None:
            grads = self._rings["grouped"].take(chunk, num_rows)
            if self._x_TD is not None:
                inputs, grads = self._by_expert(chunk, inputs, grads), inputs
            self._by_expert(chunk, arrived, grads)
        if chunk in self._loading_inputs:
            self._loading_inputs.pop(chunk)()
        saved = self._restore(chunk, inputs)
        self.grads.run(
            grads, inputs, saved, part, grads, saved_is_free=partial(self._load_saved, chunk + 1),
        )  # fmt: skip
        if grads is not arrived:
            self._by_source(chunk, grads, arrived)

    def combine(self, chunk: int) -> None:
        """Send the gradients of the rows back, and behind the last ones those of all weights."""
        departure = self._rings["grads"].of(chunk, self._num_received[chunk])
        self._tokens.combine(self, chunk, departure)
        if chunk == self._dispatch.degree - 1:
            self._returning = self.send_weights_back()

    def _load_saved(self, chunk: int) -> None:
        """Start loading a chunk's pre-activations, if they are on the host."""
        if not self._offload.offloads_middle or chunk >= self._dispatch.degree:
            return
        saved, mine = self._take_saved(chunk), self._dispatch.parts[chunk].rows
        copies = [self._offload.load("pre", saved.pre_RH, mine)]
        if saved.gate_RH is not None:
            copies.append(self._offload.load("gate", saved.gate_RH, mine))
        self._loading_saved[chunk] = saved, copies

    def _restore(self, chunk: int, inputs: torch.Tensor) -> SavedActivations:
        """Return the pre-activations, loaded or computed again."""
        if chunk in self._loading_saved:
            saved, copies = self._loading_saved.pop(chunk)
            for wait in copies:
                wait()
            return saved
        return self._project_up(chunk, inputs)
