"""Keep every activation on the device: the memory policy of the strategy "none".

A token's way to the wire: `layer`, `gate`, `function`, `executor`, **keep**, `comm`.

T tokens, K choices, N rows this rank sends, R rows it receives, D model width.
"""

from abc import abstractmethod
from functools import partial

import torch

from moetune.comm.transfer import Transfer
from moetune.domain.constraints import Order
from moetune.domain.layer import Phase
from moetune.runtime.moe.dispatch import Dispatch, slices_of
from moetune.runtime.moe.executor import PhaseInputs, PhaseRun, PipelineContext, pipelined_schedule
from moetune.runtime.moe.expert_grads import ExpertGrads, WholeStep
from moetune.runtime.moe.experts import SavedActivations
from moetune.runtime.moe.function import MemoryPolicy
from moetune.runtime.moe.pairs import dots, pick, sum_pairs, weighted_sum
from moetune.runtime.moe.products import RowPart
from moetune.runtime.moe.weight_grads import KeptRows
from moetune.runtime.moe.workspace import Shape


def keep_activations(context: PipelineContext, dispatch: Dispatch, order: Order) -> MemoryPolicy:
    """Return the policy that gives every chunk a part of its own of each buffer.

    Saved for the backward pass: the rows that the experts received, their pre-activations, and the
    results that came back, by token (for the gradient of the weights). Activations are computed
    again.
    """
    return MemoryPolicy(
        context=context, dispatch=dispatch, forward=partial(_KeepForward, order),
        backward=partial(_KeepBackward, order),
    )  # fmt: skip


class _KeepPhase(PhaseRun):
    """The common part of both phases: rows leave from a buffer to which results come back."""

    _received_RD: torch.Tensor  # the rows at the experts, of all chunks

    def __init__(self, phase: Phase, order: Order, inputs: PhaseInputs) -> None:
        super().__init__(phase, inputs)
        dispatch, context = inputs.dispatch, inputs.context
        self._is_grouped = dispatch.grouped is not None
        self._waits = context.weight_gradients is not None
        self._places_R = dispatch.by_expert(self._order.chunk_pieces)
        self._sent = slices_of(map(sum, self._order.send_counts))
        self._buffers = context.workspace.buffers(
            self._shapes(inputs, is_backward=phase == "backward"), inputs.values_TD
        )
        self.schedule = pipelined_schedule(self._order.degree, order)
        self._returning: list[Transfer] = []
        self._departures: list[torch.Tensor] = []
        self._rows_ND = self._buffers["rows"][: len(self._order.pairs_N)]

    def _shapes(self, inputs: PhaseInputs, *, is_backward: bool) -> dict[str, Shape]:
        width = inputs.values_TD.shape[1]
        received = self._dispatch.num_received, width
        shapes: dict[str, Shape] = {"rows": (self._order.num_pairs, width)}
        if self._places_R is not None:
            shapes["wire"] = received
        if is_backward and not self._waits:
            shapes["received"] = received
        if self._is_grouped or (is_backward and self._waits):  # results are what the kernels make
            return shapes
        if not is_backward:
            shapes["results"] = received
        most = self._layout.most_rows
        return shapes | inputs.experts.hidden_shapes(most, backward=is_backward)

    def dispatch(self, chunk: int) -> None:
        """Send the chunk's rows."""
        mine = self._sent[chunk]
        rows = self._rows_ND[mine]
        self._gather(mine, rows)
        into = self._received_RD if self._places_R is None else self._buffers["wire"]
        into = into[self._layout.rows[chunk]]
        self.send(chunk, rows, into)

    def compute(self, chunk: int) -> None:
        """Compute the experts on the rows that arrived."""
        mine = self._layout.rows[chunk]
        rows = self._received_RD[mine]
        if self._places_R is None:
            self._departures.append(self._run_experts(chunk, rows))
            return
        wire, places = self._buffers["wire"][mine], self._places_R[mine]
        torch.index_select(wire, 0, places, out=rows)
        self._departures.append(wire.index_copy_(0, places, self._run_experts(chunk, rows)))

    def combine(self, chunk: int) -> None:
        """Send the results back to where the rows were."""
        rows = self._rows_ND[self._sent[chunk]]
        departure = self._departures[chunk]
        self._returning.append(self.send_back(chunk, departure, rows))

    @abstractmethod
    def _gather(self, mine: slice, out: torch.Tensor) -> None:
        """Write some rows in sending order."""

    @abstractmethod
    def _run_part(self, rows: torch.Tensor, part: RowPart) -> torch.Tensor:
        """Return the results of a part's rows (R, D)."""

    def _run_experts(self, chunk: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the results of the chunk's rows (R, D)."""
        parts, mine = self._layout.parts[chunk], self._layout.rows[chunk]
        results = [self._run_part(rows[part.within(mine)], part) for part in parts]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _wait(self) -> None:
        for transfer in self._returning:
            transfer.wait()
        self._departures.clear()


class _KeepForward(_KeepPhase):
    """The forward phase."""

    def __init__(self, order: Order, inputs: PhaseInputs) -> None:
        super().__init__("forward", order, inputs)
        x_TD, num_rows = inputs.values_TD, inputs.dispatch.num_received
        self._received_RD = self._tracker.empty(
            "the experts' inputs", (num_rows, x_TD.shape[1]), x_TD
        )
        self._activations: list[SavedActivations] = []
        if not self._is_grouped:
            saved = inputs.experts.save_activations(num_rows, x_TD, self._tracker)
            self._activations.append(saved)

    def finish(self) -> torch.Tensor:
        """Return the weighted sums of the results."""
        self._wait()
        picked_TKD = pick(self._rows_ND, self._order.rows_TK, drops=self._order.drops)
        y_TD = weighted_sum(picked_TKD, self._weights_TK)
        self._tracker.add(picked_TKD, y_TD)
        tensors = [each for one in self._activations for each in (one.pre_RH, one.gate_RH)]
        self.saved = picked_TKD, self._received_RD, *tensors
        return y_TD

    def _gather(self, mine: slice, out: torch.Tensor) -> None:
        torch.index_select(self._values_TD, 0, self._order.tokens_N[mine], out=out)

    def _run_part(self, rows: torch.Tensor, part: RowPart) -> torch.Tensor:
        experts = self._experts
        if self._is_grouped:
            saved = experts.project_up(rows, None, part)
            self._tracker.add(*(each for each in (saved.pre_RH, saved.gate_RH) if each is not None))
            self._activations.append(saved)
            return experts.project_down(experts.activate(saved, {}), None, part)
        saved = experts.project_up(rows, self._activations[0].chunk(part.rows), part)
        hidden = experts.activate(saved, self._buffers)
        return experts.project_down(hidden, self._buffers["results"][part.rows], part)


class _KeepBackward(_KeepPhase):
    """The backward phase: the rows' gradients overwrite those of the results at the experts."""

    def __init__(self, order: Order, inputs: PhaseInputs) -> None:
        super().__init__("backward", order, inputs)
        if self._waits:  # longer than the buffers of a phase
            self._received_RD = self._tracker.empty(
                "the gradients of results",
                (inputs.dispatch.num_received, inputs.values_TD.shape[1]),
                inputs.values_TD,
            )
        else:
            self._received_RD = self._buffers["received"]
        self._picked_TKD, self._inputs_RD, *tensors = inputs.saved
        self._activations = [
            SavedActivations(pre_RH=pre_RH, gate_RH=gate_RH)
            for pre_RH, gate_RH in zip(tensors[::2], tensors[1::2], strict=True)
        ]
        self._grad_weights_TK = torch.empty_like(self._weights_TK)
        self._num_ahead = self.schedule.index(("compute", 0))
        self.grads = self._make_grads(inputs)

    def begin(self) -> None:
        """Order the weights by row; each dispatch gathers its own rows."""
        weights_N = self._order.weights_of_rows(self._weights_TK)
        self._weights_N1 = weights_N.unsqueeze(1).to(self._values_TD.dtype)

    def dispatch(self, chunk: int) -> None:
        """Send the chunk's rows; behind the first ones, make the weights' gradients."""
        super().dispatch(chunk)
        if chunk == self._num_ahead - 1:  # the first rows travel meanwhile
            dots(self._picked_TKD, self._values_TD, self._grad_weights_TK)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x and of the weights."""
        self._wait()
        grad_TD = self._values_TD
        grad_x_TD = self._tracker.empty("the gradient of x", grad_TD.shape, grad_TD)
        sum_pairs(self._rows_ND, self._order.rows_TK, grad_x_TD, drops=self._order.drops)
        return grad_x_TD, self._grad_weights_TK

    def _gather(self, mine: slice, out: torch.Tensor) -> None:
        torch.index_select(self._values_TD, 0, self._order.tokens_N[mine], out=out)
        out.mul_(self._weights_N1[mine])

    def _run_part(self, rows: torch.Tensor, part: RowPart) -> torch.Tensor:
        if self._is_grouped:
            saved = self._activations[part.piece]
        else:
            saved = self._activations[0].chunk(part.rows)
        into = None if self._is_grouped or self._waits else rows
        return self.grads.run(rows, self._inputs_RD[part.rows], saved, part, into)

    def _make_grads(self, inputs: PhaseInputs) -> ExpertGrads:
        """Return the experts' backward; grouped, or where products wait, of the whole step."""
        whole = None
        if self._is_grouped or self._waits:
            kept = KeptRows(self._dispatch.by_expert_in_step(), self._tracker)
            whole = WholeStep(
                inputs_RD=self._inputs_RD, grads_RD=self._received_RD, kept=kept,
                part=self._dispatch.whole_part(kept.by_expert), is_grouped=self._is_grouped,
            )  # fmt: skip
        return ExpertGrads(
            inputs.experts, inputs.wanted, self._layout.num_parts, self._buffers, self._tracker,
            whole=whole,
        )  # fmt: skip
