"""Reuse a few buffers for all chunks: the memory policies S1 to S4 (MPipeMoE §III-D).

A token's way to the wire: `layer`, `gate`, `function`, `executor`, **reuse**, `comm`.

At the experts, the rows that they receive (T_DI) and return (T_DO) have two buffers each, and the
pre-activations (T_M) have a single buffer. For the backward pass a strategy loads T_DI and T_M from
the host, or sends T_DI again and computes T_M again. Rows of tokens that travel once are expanded
into another buffer, and the sums to send back replace T_DO.

T tokens, K choices, R rows this rank receives, D model width.
"""

from functools import partial

import torch

from moetune.comm.group import Transfer, Wait
from moetune.domain.layer import Phase
from moetune.runtime.moe.executor import (
    DispatchedPhase,
    PhaseInputs,
    pipelined_schedule,
    ring_schedule,
)
from moetune.runtime.moe.experts import SavedActivations
from moetune.runtime.moe.offload import Offload
from moetune.runtime.moe.rings import Ring, TokenExchange, make_rings
from moetune.runtime.moe.workspace import empty

_AT_EXPERTS = 2
"""Buffers at the experts: one chunk's rows arrive or leave while another chunk is computed."""
_TRAVELLING = 3
"""Buffers at the tokens, forward: one chunk's rows leave, another chunk's results come back, and
the third buffer lets the next dispatch go first (see `ring_schedule`)."""
_LEAVING = 3
"""Buffers of gradients at the experts, backward; results leave from the buffer in which rows
arrived. A chunk arrives, another is computed, a third leaves. The forward schedule would need a
fourth."""


_OF_EXPERTS = frozenset({"rows", "inputs"})
"""Rings whose rows are ordered by expert."""


class _ReusePhase(DispatchedPhase):
    """The common part of both phases: chunks, rings, and the buffer for pre-activations.

    Args:
        offload: copies to the host and back what the strategy does not recompute or resend.
    """

    def __init__(self, phase: Phase, offload: Offload, inputs: PhaseInputs) -> None:
        super().__init__(phase, inputs)
        self._offload = offload
        self._num_arriving = [rows.stop - rows.start for rows in inputs.dispatch.received]
        self._leaving: dict[int, torch.Tensor] = {}

    def _make_rings(self, num_travelling: int, at_experts: dict[str, int]) -> dict[str, Ring]:
        """Return the phase's rings, all allocated at once.

        Args:
            num_travelling: number of buffers at the tokens.
            at_experts: numbers of buffers at the experts by kind: "rows" and "inputs" have the
                experts' rows, other kinds the rows that travel.
        """
        degree, width = self._dispatch.degree, self._values_TD.shape[1]
        most_sent = max(map(sum, self._dispatch.counts.travelling.send_CP))
        most, most_arriving = self._dispatch.most_rows, max(self._num_arriving)
        hidden = {name: (most, wide) for name, wide in self._experts.saved_widths.items()}
        hidden |= self._experts.hidden_shapes(most, backward="grads" in at_experts)
        shapes = {"travelling": (num_travelling, most_sent, width)}
        shapes |= {
            name: (min(num, degree), most if name in _OF_EXPERTS else most_arriving, width)
            for name, num in at_experts.items()
        }
        shapes |= {name: (1, *shape) for name, shape in hidden.items()}
        rings = make_rings(self._context.workspace, shapes, self._values_TD)
        self._buffers = {name: rings[name].whole for name in hidden}
        self._hidden_rings = {name: rings[name] for name in ("pre", "gate") if name in rings}
        return rings

    def _num_rows(self, chunk: int) -> int:
        """Return the number of the chunk's rows that this rank's experts compute."""
        return sum(self._dispatch.counts.rows_CL[chunk])

    def _take_saved(self, chunk: int) -> SavedActivations:
        """Return the uninitialised buffers for the chunk's pre-activations."""
        rows = self._num_rows(chunk)
        taken = {name: ring.of(chunk, rows) for name, ring in self._hidden_rings.items()}
        return SavedActivations(pre_RH=taken["pre"], gate_RH=taken.get("gate"))

    def _project_up(self, chunk: int, rows: torch.Tensor) -> SavedActivations:
        """Return the pre-activations of the chunk's rows."""
        saved = self._take_saved(chunk)
        self._experts.project_up(rows, saved, self._dispatch.parts[chunk])
        return saved

    def _expand(self, chunk: int, arrived: torch.Tensor, ring: Ring) -> torch.Tensor:
        """Return the chunk's rows by expert, as they arrived or expanded from them."""
        if self._received is None:
            return arrived
        out, part = ring.of(chunk, self._num_rows(chunk)), self._dispatch.parts[chunk].rows
        return self._received.expand(arrived, part, out=out)

    def _leave(self, chunk: int, results: torch.Tensor) -> None:
        """Keep the rows that leave: the experts' results, or their sums by received row."""
        if self._received is not None:
            part, arrived = self._dispatch.parts[chunk].rows, self._dispatch.received[chunk]
            results = self._received.sums.of(results, part, arrived)
        self._leaving[chunk] = results


class ReuseForward(_ReusePhase):
    """The forward phase; all its buffers are allocated before the first exchange."""

    def __init__(self, offload: Offload, inputs: PhaseInputs) -> None:
        super().__init__("forward", offload, inputs)
        degree, x_TD = self._dispatch.degree, inputs.values_TD
        offload.begin(self._dispatch.num_received, x_TD, self._experts.saved_widths)
        self.schedule = ring_schedule(degree)
        at_experts = {"arrivals": _AT_EXPERTS}
        at_experts |= {"rows": 1} if self._sends_tokens else {"departures": _AT_EXPERTS}
        self._rings = self._make_rings(min(_TRAVELLING, degree), at_experts)
        y_TD = empty("the results", x_TD.shape, x_TD)
        self._tokens = TokenExchange(self._dispatch, self._rings["travelling"], y_TD)

    def finish(self) -> torch.Tensor:
        """Return the weighted outputs (T, D)."""
        y_TD = self._tokens.finish()
        self._leaving.clear()
        self._offload.wait_for_saves()
        x_TD = None if self._offload.offloads_input else self._values_TD
        self.saved = *self.saved_places(), x_TD, self._weights_R1
        return y_TD

    def dispatch(self, chunk: int) -> None:
        """Send the chunk's rows."""
        self._offload.wait_for_save("input", chunk % _AT_EXPERTS)
        arrival = self._rings["arrivals"].of(chunk, self._num_arriving[chunk])
        self._tokens.dispatch(self, chunk, self._values_TD, arrival)

    def compute(self, chunk: int) -> None:
        """Run the experts on the rows that arrived."""
        if chunk == 0:
            self._weights_R1 = self.arrived_weights()
        part = self._dispatch.parts[chunk]
        arrived = self._rings["arrivals"].of(chunk, self._num_arriving[chunk])
        rows, input_buffer = arrived, chunk % _AT_EXPERTS
        if self._sends_tokens:
            rows = self._expand(chunk, arrived, self._rings["rows"])
            input_buffer = 0  # whose last save ended before the last chunk's results
        self._offload.save("input", input_buffer, rows, part.rows)
        hidden = self._hidden(chunk, rows)
        if self._sends_tokens:  # results overwrite the rows, whose copy to the host must have ended
            self._offload.wait_for_save("input", input_buffer)
        # Only now: earlier results travel during the up-projection.
        self._tokens.wait_for(chunk - _AT_EXPERTS)
        self._leaving.pop(chunk - _AT_EXPERTS, None)
        out = rows
        if not self._sends_tokens:
            out = self._rings["departures"].of(chunk, len(rows))
        self._experts.project_down(hidden, self._weights_R1[part.rows], out, part)
        self._leave(chunk, out)

    def combine(self, chunk: int) -> None:
        """Send the results back."""
        self._tokens.combine(self, chunk, self._leaving[chunk])

    def _hidden(self, chunk: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the chunk's hidden values, and start to offload its pre-activations."""
        for name in ("pre", "gate"):
            self._offload.wait_for_save(name, 0)
        saved, mine = self._project_up(chunk, rows), self._dispatch.parts[chunk].rows
        hidden = self._experts.activate(saved, self._buffers["hidden"])
        self._offload.save("pre", 0, saved.pre_RH, mine)
        if saved.gate_RH is not None:
            self._offload.save("gate", 0, saved.gate_RH, mine)
        return hidden


class ReuseBackward(_ReusePhase):
    """The backward phase: the rows' gradients overwrite the results' gradients."""

    def __init__(self, offload: Offload, inputs: PhaseInputs) -> None:
        super().__init__("backward", offload, inputs)
        self._x_TD, weights_R1 = self.restore_places(inputs.saved)
        grad_TD, degree = inputs.values_TD, self._dispatch.degree
        self.schedule = pipelined_schedule(degree, "interleaved")
        # A buffer more than a chunk has dispatches: see `TokenExchange`.
        num_travelling = (1 if self._x_TD is None else 2) + (degree > 1)
        at_experts = {"grads": _LEAVING, "inputs": _AT_EXPERTS}
        if self._sends_tokens:
            at_experts = {"grads": _AT_EXPERTS, "rows": 1, "inputs": _AT_EXPERTS}
            if self._x_TD is not None:
                at_experts |= {"inputs": 1, "arrivals": _AT_EXPERTS}
        self._rings = self._make_rings(num_travelling, at_experts)
        self.grads = self.expert_grads(inputs, weights_R1, self._buffers)
        grad_x_TD = empty("the gradient of x", grad_TD.shape, grad_TD)
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
        """Send the gradients, and get the experts' inputs again: by all-to-all or from the host."""
        if self._x_TD is not None:
            ring = self._rings["arrivals" if self._sends_tokens else "inputs"]
            arriving = ring.of(chunk, self._num_arriving[chunk])
            self._tokens.dispatch(self, chunk, self._x_TD, arriving)
        arriving = self._rings["grads"].of(chunk, self._num_arriving[chunk])
        self._tokens.dispatch(self, chunk, self._values_TD, arriving)
        if self._x_TD is None:  # after the exchange: on a CPU the copy takes the caller's time
            inputs = self._rings["inputs"].of(chunk, self._num_rows(chunk))
            mine = self._dispatch.parts[chunk].rows
            self._loading_inputs[chunk] = self._offload.load("input", inputs, mine)

    def compute(self, chunk: int) -> None:
        """Compute the experts' gradients, which overwrite the gradients that arrived."""
        part, rings = self._dispatch.parts[chunk], self._rings
        grads = rings["grads"].of(chunk, self._num_arriving[chunk])
        if self._sends_tokens:
            grads = self._expand(chunk, grads, rings["rows"])
            if self._x_TD is not None:
                arrived = rings["arrivals"].of(chunk, self._num_arriving[chunk])
                self._expand(chunk, arrived, rings["inputs"])
        inputs = rings["inputs"].of(chunk, self._num_rows(chunk))
        if chunk in self._loading_inputs:
            self._loading_inputs.pop(chunk)()
        saved = self._restore(chunk, inputs)
        self.grads.run(
            grads, inputs, saved, part, grads, saved_is_free=partial(self._load_saved, chunk + 1),
        )  # fmt: skip
        self._leave(chunk, grads)

    def combine(self, chunk: int) -> None:
        """Send the rows' gradients back, and after the last chunk all weights' gradients."""
        self._tokens.combine(self, chunk, self._leaving.pop(chunk))
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
