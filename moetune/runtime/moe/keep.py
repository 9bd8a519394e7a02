"""Keep every activation on the device: the memory policy of the strategy "none".

A token's way to the wire: `layer`, `gate`, `function`, `executor`, **keep**, `comm`.

T tokens, K choices, N rows this rank sends, R rows it receives, D model width.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from moetune.comm.transfer import Transfer
from moetune.domain.constraints import Order
from moetune.domain.layer import Phase
from moetune.runtime.moe.dispatch import Dispatch, GroupedRows, PhaseOrder, slices_of
from moetune.runtime.moe.executor import Executor, PipelineContext, pipelined_schedule
from moetune.runtime.moe.expert_grads import DeferredGrads, ExpertGrads, ParameterGrads
from moetune.runtime.moe.experts import SavedActivations
from moetune.runtime.moe.function import PhaseInputs, Saved
from moetune.runtime.moe.pairs import dots, pick, sum_pairs, weighted_sum
from moetune.runtime.moe.products import RowPart
from moetune.runtime.moe.regroup import by_expert, by_expert_in_step
from moetune.runtime.moe.weight_grads import DeferredProducts
from moetune.runtime.moe.workspace import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepActivations:
    """The policy that gives every chunk a part of its own of each buffer.

    Saved for the backward pass: the rows that the experts received, their pre-activations, and the
    results that came back, by token (for the gradient of the weights). Activations are computed
    again.
    """

    context: PipelineContext
    dispatch: Dispatch
    order: Order

    def forward(self, inputs: PhaseInputs) -> "_KeepForward":
        """Make the buffers of the forward phase."""
        return _KeepForward(self, inputs)

    def backward(self, inputs: PhaseInputs) -> "_KeepBackward":
        """Make the buffers of the backward phase."""
        return _KeepBackward(self, inputs)

    def release(self) -> None:
        """Do nothing: the policy borrows no memory."""


class _KeepPhase(ABC):
    """The common part of both phases: rows leave from a buffer to which results come back."""

    _received_RD: torch.Tensor  # the rows at the experts, of all chunks

    def __init__(self, policy: KeepActivations, phase: Phase, inputs: PhaseInputs) -> None:
        self._values_TD, self._weights_TK = inputs.values_TD, inputs.weights_TK
        dispatch, like_TD = policy.dispatch, inputs.values_TD
        self._order: PhaseOrder = getattr(dispatch, phase)
        self._layout = dispatch.layout(self._order)
        self._is_grouped = dispatch.grouped is not None
        self._waits = policy.context.weight_gradients is not None
        self._places_R = by_expert(dispatch, self._order.chunk_pieces)
        self._sent = slices_of(map(sum, self._order.send_counts))
        self._tracker = policy.context.tracker
        self._buffers = policy.context.workspace.buffers(
            self._shapes(dispatch, inputs, is_backward=phase == "backward"), like_TD
        )
        self.executor = Executor(policy.context, phase, self._order.degree)
        self.schedule = pipelined_schedule(self._order.degree, policy.order)
        self._returning: list[Transfer] = []
        self._departures: list[torch.Tensor] = []
        self._rows_ND = self._buffers["rows"][: len(self._order.pairs_N)]

    def _shapes(
        self, dispatch: Dispatch, inputs: PhaseInputs, *, is_backward: bool
    ) -> dict[str, Shape]:
        width = inputs.values_TD.shape[1]
        received = dispatch.num_received, width
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
        self.executor.dispatch(chunk, self._order, rows, into)

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
        self._returning.append(self.executor.combine(chunk, self._order, departure, rows))

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

    saved: Saved

    def __init__(self, policy: KeepActivations, inputs: PhaseInputs) -> None:
        super().__init__(policy, "forward", inputs)
        self._experts, x_TD = inputs.experts, inputs.values_TD
        num_rows = policy.dispatch.num_received
        self._received_RD = self._tracker.empty(
            "the experts' inputs", (num_rows, x_TD.shape[1]), x_TD
        )
        self._activations: list[SavedActivations] = []
        if not self._is_grouped:
            saved = inputs.experts.save_activations(num_rows, x_TD, self._tracker)
            self._activations.append(saved)

    def begin(self) -> None:
        """Do nothing: each dispatch gathers its own rows."""

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

    def __init__(self, policy: KeepActivations, inputs: PhaseInputs) -> None:
        super().__init__(policy, "backward", inputs)
        if self._waits:  # longer than the buffers of a phase
            self._received_RD = self._tracker.empty(
                "the gradients of results",
                (policy.dispatch.num_received, inputs.values_TD.shape[1]),
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
        self.grads = self._make_grads(policy.dispatch, inputs)

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
        inputs = self._inputs_RD[part.rows]
        if self._is_grouped:
            saved = self._activations[part.piece]
            return self.grads.run(rows, inputs, saved, part, None)
        saved, into = self._activations[0].chunk(part.rows), None if self._waits else rows
        return self.grads.run(rows, inputs, saved, part, into)

    def _make_grads(self, dispatch: Dispatch, inputs: PhaseInputs) -> ParameterGrads:
        grouped = dispatch.grouped
        if grouped is None and not self._waits:
            return ExpertGrads(
                inputs.experts, inputs.wanted, self._order.degree, self._buffers, self._tracker
            )
        if grouped is None:
            grouped = GroupedRows.of(
                dispatch.counts.receive_PCL.sum(0), dispatch.num_received,
                like=inputs.values_TD, bias=inputs.experts.b1 is not None,
            )  # fmt: skip
        products = DeferredProducts(
            dispatch.counts.rows_CL, dispatch.counts.receive_PCL.sum((0, 1)),
            by_expert_in_step(dispatch), grouped.one_hot_RL, self._tracker,
            scale=inputs.wanted.scale, is_grouped=self._is_grouped,
        )  # fmt: skip
        return DeferredGrads(
            inputs.experts, inputs.wanted, self._inputs_RD, self._received_RD, products
        )
