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
from moetune.runtime.moe.dispatch import Dispatch, PhaseOrder, slices_of
from moetune.runtime.moe.executor import Executor, PipelineContext, pipelined_schedule
from moetune.runtime.moe.experts import ExpertGrads, SavedActivations
from moetune.runtime.moe.function import PhaseInputs, Saved
from moetune.runtime.moe.regroup import Regroup, regroups
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


@dataclass(frozen=True, slots=True)
class _ChunkBuffers:
    """One chunk's rows at the experts; `rows` and `results` are in the order of the experts.

    `arrival` and `departure` are in the order of the ranks. They are the same memory as `rows` and
    `results` where regrouping changes nothing.
    """

    rows: torch.Tensor
    arrival: torch.Tensor
    departure: torch.Tensor
    results: torch.Tensor
    regroup: Regroup | None


class _KeepPhase(ABC):
    """The common part of both phases: rows leave from a buffer to which results come back."""

    def __init__(self, policy: KeepActivations, phase: Phase, inputs: PhaseInputs) -> None:
        self._values_TD, self._weights_TK = inputs.values_TD, inputs.weights_TK
        dispatch, like_TD = policy.dispatch, inputs.values_TD
        self._order: PhaseOrder = getattr(dispatch, phase)
        self._layout = dispatch.layout(self._order)
        self._regroups = regroups(dispatch, self._order)
        self._sent = slices_of(map(sum, self._order.send_counts))
        is_backward, degree = phase == "backward", self._order.degree
        received = dispatch.num_received, like_TD.shape[1]
        shapes: dict[str, Shape] = {"rows": (self._order.num_pairs, like_TD.shape[1])}
        shapes["received" if is_backward else "results"] = received
        if any(not one.changes_nothing for one in self._regroups):
            shapes["wire"] = received
        shapes |= inputs.experts.hidden_shapes(self._layout.most_rows, backward=is_backward)
        self._buffers = policy.context.workspace.buffers(shapes, like_TD)
        self._tracker = policy.context.tracker
        self.executor = Executor(policy.context, phase, degree)
        self.schedule = pipelined_schedule(degree, policy.order)
        self._returning: list[Transfer] = []
        self._rows_ND = self._buffers["rows"][: len(self._order.pairs_N)]
        self._chunks: list[_ChunkBuffers] = []

    def dispatch(self, chunk: int) -> None:
        """Send the chunk's rows."""
        rows = self._rows_ND[self._sent[chunk]]
        self.executor.dispatch(chunk, self._order, rows, self._chunks[chunk].arrival)

    def compute(self, chunk: int) -> None:
        """Compute the experts on the rows that arrived."""
        buffers = self._chunks[chunk]
        if buffers.regroup is not None:
            buffers.regroup.by_expert(buffers.arrival, buffers.rows)
        self._run_experts(chunk, buffers.rows, buffers.results)
        if buffers.regroup is not None:
            buffers.regroup.by_source(buffers.results, buffers.departure)

    def combine(self, chunk: int) -> None:
        """Send the results back to where the rows were."""
        rows = self._rows_ND[self._sent[chunk]]
        departure = self._chunks[chunk].departure
        self._returning.append(self.executor.combine(chunk, self._order, departure, rows))

    @abstractmethod
    def _run_experts(self, chunk: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Compute on the chunk's rows (R, D), with the result in `out`, which may be `rows`."""

    def _cut(self, received_RD: torch.Tensor, results_RD: torch.Tensor) -> None:
        """Cut the chunks' buffers; `results_RD` may be `received_RD`, to overwrite it."""
        for mine, regroup in zip(self._layout.rows, self._regroups, strict=True):
            rows, results = received_RD[mine], results_RD[mine]
            if regroup.changes_nothing:
                buffers = _ChunkBuffers(rows, rows, results, results, None)
            else:
                wire = self._buffers["wire"][mine]
                buffers = _ChunkBuffers(rows, wire, wire, results, regroup)
            self._chunks.append(buffers)

    def _wait(self) -> None:
        for transfer in self._returning:
            transfer.wait()


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
        self._activations = inputs.experts.save_activations(num_rows, x_TD, self._tracker)
        self._cut(self._received_RD, self._buffers["results"])

    def begin(self) -> None:
        """Gather the tokens' rows."""
        _gather(self._values_TD, self._order, self._weights_TK.shape[1], self._rows_ND)

    def finish(self) -> torch.Tensor:
        """Return the weighted sums of the results."""
        self._wait()
        picked_TKD = _pick(self._rows_ND, self._order, self._weights_TK.shape[1])
        y_TD = _weighted_sum(picked_TKD, self._weights_TK.to(self._values_TD.dtype))
        self._tracker.add(picked_TKD, y_TD)
        activations = self._activations
        self.saved = picked_TKD, self._received_RD, activations.pre_RH, activations.gate_RH
        return y_TD

    def _run_experts(self, chunk: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        blocks, experts = self._layout.blocks[chunk], self._experts
        activations = self._activations.chunk(self._layout.rows[chunk])
        experts.project_up(rows, activations, blocks)
        experts.project_down(experts.activate(activations, self._buffers), out, blocks)


class _KeepBackward(_KeepPhase):
    """The backward phase: the rows' gradients overwrite those of the results at the experts."""

    def __init__(self, policy: KeepActivations, inputs: PhaseInputs) -> None:
        super().__init__(policy, "backward", inputs)
        self._picked_TKD, self._inputs_RD, pre_RH, gate_RH = inputs.saved
        self._activations = SavedActivations(pre_RH=pre_RH, gate_RH=gate_RH)
        self.grads = ExpertGrads(
            inputs.experts, inputs.wanted, self._order.degree, self._buffers, self._tracker
        )
        self._cut(self._buffers["received"], self._buffers["received"])

    def begin(self) -> None:
        """Weight and gather the gradients' rows."""
        grad_TD, top_k = self._values_TD, self._weights_TK.shape[1]
        scratch_TKD = self._buffers["rows"].view(self._picked_TKD.shape)
        torch.mul(self._picked_TKD, grad_TD.unsqueeze(1), out=scratch_TKD)
        self._grad_weights_TK = scratch_TKD.sum(dim=2)
        _gather(grad_TD, self._order, top_k, self._rows_ND)
        self._rows_ND *= _of_rows(self._weights_TK, self._order).to(grad_TD.dtype)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x and of the weights."""
        self._wait()
        grad_TD, order, top_k = self._values_TD, self._order, self._weights_TK.shape[1]
        if top_k == 1:
            grad_x_TD = _pick(self._rows_ND, order, top_k).squeeze(1)
            self._tracker.add(grad_x_TD)
        else:
            grad_x_TD = self._tracker.empty("the gradient of x", grad_TD.shape, grad_TD).zero_()
            grad_x_TD.index_add_(0, order.pairs_N // top_k, self._rows_ND)
        return grad_x_TD, self._grad_weights_TK

    def _run_experts(self, chunk: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        mine = self._layout.rows[chunk]
        self.grads.run(
            rows, self._inputs_RD[mine], self._activations.chunk(mine), self._layout.blocks[chunk],
            out,
        )  # fmt: skip


def _weighted_sum(picked_TKD: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    y_TD = picked_TKD[:, 0] * weights_TK[:, :1]
    for choice in range(1, weights_TK.shape[1]):
        y_TD.addcmul_(picked_TKD[:, choice], weights_TK[:, choice, None])
    return y_TD


def _gather(x_TD: torch.Tensor, order: PhaseOrder, top_k: int, out_ND: torch.Tensor) -> None:
    """Write the tokens' rows in sending order."""
    tokens_N = order.pairs_N if top_k == 1 else order.pairs_N // top_k
    torch.index_select(x_TD, 0, tokens_N, out=out_ND)


def _of_rows(weights_TK: torch.Tensor, order: PhaseOrder) -> torch.Tensor:
    return weights_TK.reshape(-1).index_select(0, order.pairs_N).unsqueeze(1)


def _pick(rows_ND: torch.Tensor, order: PhaseOrder, top_k: int) -> torch.Tensor:
    """Return every pair's row (T, K, D), zeros for dropped pairs."""
    num_rows, width = rows_ND.shape
    shape = (order.num_pairs // top_k, top_k, width)
    if not num_rows:
        return rows_ND.new_zeros(shape)
    row_of_pair = order.row_of_pair()
    if num_rows == order.num_pairs:
        return rows_ND.index_select(0, row_of_pair).view(shape)
    picked = rows_ND.index_select(0, row_of_pair.clamp(max=num_rows - 1))
    return picked.masked_fill_((row_of_pair == num_rows).unsqueeze(1), 0).view(shape)
