"""Keep every activation on the device: the memory policy of the strategy "none".

A token's way to the wire: `layer`, `gate`, `function`, `executor`, **keep**, `comm`.

Every chunk has a separate part of each buffer. The backward pass gets the rows that the experts
received, their combine weights and their pre-activations. It computes the activations again.

T tokens, N rows this rank sends, R rows it receives, D model width.
"""

from abc import abstractmethod

import torch

from moetune.comm.group import Transfer
from moetune.domain.constraints import Order
from moetune.domain.layer import Phase
from moetune.runtime.moe.executor import DispatchedPhase, PhaseInputs, pipelined_schedule
from moetune.runtime.moe.experts import SavedActivations
from moetune.runtime.moe.products import RowPart
from moetune.runtime.moe.weight_grads import StepFactors
from moetune.runtime.moe.workspace import Shape, empty


class _KeepPhase(DispatchedPhase):
    """The common part of both phases: results come back into the buffer that rows left from."""

    _received_RD: torch.Tensor  # all chunks' rows at the experts
    _results_RD: torch.Tensor | None = None  # memory for their results, if no kernel allocates it

    def __init__(self, phase: Phase, order: Order, inputs: PhaseInputs) -> None:
        super().__init__(phase, inputs)
        dispatch, context = inputs.dispatch, inputs.context
        self._is_grouped = dispatch.grouped is not None
        self._buffers = context.workspace.buffers(
            self._shapes(inputs, is_backward=phase == "backward"), inputs.values_TD
        )
        self.schedule = pipelined_schedule(dispatch.degree, order)
        self._returning: list[Transfer] = []
        self._departures: list[torch.Tensor] = []

    def _shapes(self, inputs: PhaseInputs, *, is_backward: bool) -> dict[str, Shape]:
        width = inputs.values_TD.shape[1]
        received = self._dispatch.num_received, width
        shapes: dict[str, Shape] = {}
        if not self._is_local:
            shapes["rows"] = self._dispatch.num_sent, width
        if self._sends_tokens:
            shapes["wire"] = self._dispatch.received[-1].stop, width
        if is_backward:
            shapes["received"] = received
        if self._is_grouped:  # results are what the kernels make
            return shapes
        if not is_backward:
            shapes["results"] = received
        most = self._dispatch.most_rows
        return shapes | inputs.experts.hidden_shapes(most, backward=is_backward)

    def dispatch(self, chunk: int) -> None:
        """Send the chunk's rows."""
        mine = self._dispatch.sent[chunk]
        into = self._buffers["wire"] if self._sends_tokens else self._received_RD
        into = into[self._dispatch.received[chunk]]
        rows = into if self._is_local else self._buffers["rows"][mine]
        torch.index_select(self._values_TD, 0, self._dispatch.tokens_M[mine], out=rows)
        if not self._is_local:
            self.send(chunk, rows, into)

    def compute(self, chunk: int) -> None:
        """Run the experts on the rows that arrived."""
        part = self._dispatch.parts[chunk]
        rows = self._received_RD[part.rows]
        if self._received is None:
            self._departures.append(self._run_experts(chunk, rows, part))
            return
        arrived = self._dispatch.received[chunk]
        wire = self._buffers["wire"][arrived]
        self._received.expand(wire, part.rows, out=rows)
        results = self._run_experts(chunk, rows, part)
        if self._weights_TK.shape[1] == 1:  # a row has a single result, and is free for it
            sums = wire.index_copy_(0, self._received.places_R[part.rows], results)
        else:
            sums = self._received.sums.of(results, part.rows, arrived)
        self._departures.append(sums)

    def combine(self, chunk: int) -> None:
        """Send the results back to where the rows were."""
        if not self._is_local:
            rows = self._buffers["rows"][self._dispatch.sent[chunk]]
            self._returning.append(self.send_back(chunk, self._departures[chunk], rows))

    @abstractmethod
    def _run_experts(self, chunk: int, rows: torch.Tensor, part: RowPart) -> torch.Tensor:
        """Return the results of the chunk's rows (R, D)."""

    def _sums(self) -> torch.Tensor:
        """Return the sums of the results by token (T, D), once all have come back."""
        for transfer in self._returning:
            transfer.wait()
        if not self._is_local:
            rows_ND = self._buffers["rows"]
        elif self._results_RD is not None:
            rows_ND = self._results_RD
        else:
            several = len(self._departures) > 1
            rows_ND = torch.cat(self._departures) if several else self._departures[0]
        self._departures.clear()
        return self._dispatch.sums.of(rows_ND, slice(0, None), slice(0, None))


class KeepForward(_KeepPhase):
    """The forward phase."""

    def __init__(self, order: Order, inputs: PhaseInputs) -> None:
        super().__init__("forward", order, inputs)
        x_TD, num_rows = inputs.values_TD, inputs.dispatch.num_received
        self._received_RD = empty("the experts' inputs", (num_rows, x_TD.shape[1]), x_TD)
        self._activations: list[SavedActivations] = []
        if not self._is_grouped:
            self._results_RD = self._buffers["results"]
            saved = inputs.experts.save_activations(num_rows, x_TD)
            self._activations = [saved.chunk(part.rows) for part in self._dispatch.parts]

    def compute(self, chunk: int) -> None:
        """Run the experts on the rows that arrived; the first chunk also takes the weights."""
        if chunk == 0:
            self._weights_R1 = self.arrived_weights()
        super().compute(chunk)

    def finish(self) -> torch.Tensor:
        """Return the sums of the weighted results (T, D)."""
        tensors = [rows for chunk in self._activations for rows in (chunk.pre_RH, chunk.gate_RH)]
        self.saved = *self.saved_places(), self._received_RD, self._weights_R1, *tensors
        return self._sums()

    def _run_experts(self, chunk: int, rows: torch.Tensor, part: RowPart) -> torch.Tensor:
        experts, results = self._experts, None
        if self._is_grouped:
            saved, hidden = experts.project_up_and_activate(rows, part)
            self._activations.append(saved)
        else:
            saved = experts.project_up(rows, self._activations[chunk], part)
            hidden = experts.activate(saved, self._buffers["hidden"])
            results = self._buffers["results"][part.rows]
        return experts.project_down(hidden, self._weights_R1[part.rows], results, part)


class KeepBackward(_KeepPhase):
    """The backward phase: the rows' gradients overwrite the results' gradients at the experts."""

    def __init__(self, order: Order, inputs: PhaseInputs) -> None:
        super().__init__("backward", order, inputs)
        self._received_RD = self._buffers["received"]
        self._results_RD = None if self._is_grouped else self._received_RD
        self._inputs_RD, weights_R1, *tensors = self.restore_places(inputs.saved)
        self._activations = [
            SavedActivations(pre_RH=pre_RH, gate_RH=gate_RH)
            for pre_RH, gate_RH in zip(tensors[::2], tensors[1::2], strict=True)
        ]
        factors = None
        if self._is_grouped:
            factors = StepFactors(self._dispatch, self._inputs_RD, self._received_RD, weights_R1)
        self.grads = self.expert_grads(inputs, weights_R1, self._buffers, factors)

    def combine(self, chunk: int) -> None:
        """Send the chunk's gradients back, and after the last chunk all weights' gradients."""
        super().combine(chunk)
        if chunk == self._dispatch.degree - 1:
            self._returning.append(self.send_weights_back())

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x and of the weights."""
        return self._sums(), self._weights.returned(self._weights_TK)

    def _run_experts(self, chunk: int, rows: torch.Tensor, part: RowPart) -> torch.Tensor:
        into = None if self._is_grouped else rows
        saved = self._activations[chunk]
        return self.grads.run(rows, self._inputs_RD[part.rows], saved, part, into)
