"""Sum experts over a tensor-parallel group: the memory policy without dispatch (PPMoE §3.3).

A token's way to the wire: `layer`, `gate`, `function`, `executor`, **tensor**, `comm`.

A rank computes the pairs of its experts, and an all-reduce sums the ranks' outputs. The backward
pass gets x and the experts' pre-activations, and gathers the rows from x again.

T tokens, which every rank has, K choices, R pairs of this rank's experts, D model width.
"""

import torch

from moetune.comm.group import Transfer
from moetune.domain.layer import Phase
from moetune.runtime.moe.executor import PhaseInputs, PhaseRun, local_schedule
from moetune.runtime.moe.experts import SavedActivations
from moetune.runtime.moe.pairs import of_pairs
from moetune.runtime.moe.workspace import Shape, empty


class _TensorPhase(PhaseRun):
    """The common part of both phases: sum a chunk's rows by token, then over the ranks."""

    _what: str  # purpose of the sums, for the error

    def __init__(self, phase: Phase, inputs: PhaseInputs) -> None:
        super().__init__(phase, inputs)
        self.schedule = local_schedule(self._dispatch.degree)
        self._reductions: list[Transfer] = []
        is_backward, most = phase == "backward", self._dispatch.most_rows
        names = ("rows", "grads" if is_backward else "results")
        shapes: dict[str, Shape] = dict.fromkeys(names, (most, self._values_TD.shape[1]))
        shapes |= inputs.experts.hidden_shapes(most, backward=is_backward)
        self._buffers = self._context.workspace.buffers(shapes, self._values_TD)

    def begin(self) -> None:
        """Allocate the sums by token."""
        self._sums_TD = empty(self._what, self._values_TD.shape, self._values_TD)

    def combine(self, chunk: int) -> None:
        """Start summing the chunk's tokens over the ranks."""
        sums = self._sums_TD[self._dispatch.tokens_of(chunk)]
        reduce = self._context.communicator.all_reduce
        self._reductions.append(
            self.start("sum", chunk, lambda name: reduce(sums, name), num_bytes=sums.nbytes)
        )

    def _sum(self, chunk: int, rows: torch.Tensor) -> None:
        """Write the sums of the rows to the chunk's tokens; no other chunk writes there."""
        part, tokens = self._dispatch.parts[chunk].rows, self._dispatch.tokens_of(chunk)
        self._dispatch.sums.into(rows, part, self._sums_TD, tokens)

    def _take(self, buffer: str, values_TD: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return the chunk's rows of tokens, gathered into a buffer."""
        tokens = self._dispatch.tokens_M[self._dispatch.parts[chunk].rows]
        return torch.index_select(values_TD, 0, tokens, out=self._buffers[buffer][: len(tokens)])

    def _summed(self) -> torch.Tensor:
        """Return the sums over the ranks, once all all-reduces have ended."""
        for transfer in self._reductions:
            transfer.wait()
        return self._sums_TD


class TensorForward(_TensorPhase):
    """The forward phase."""

    _what = "the results"

    def __init__(self, inputs: PhaseInputs) -> None:
        super().__init__("forward", inputs)
        weights_R1 = inputs.weights_TK.reshape(-1, 1).index_select(0, self._dispatch.pairs_N)
        self._activations = saved = inputs.experts.save_activations(
            len(weights_R1), self._values_TD
        )
        self._weights_R1 = weights_R1
        self.saved = self._values_TD, weights_R1, saved.pre_RH, saved.gate_RH

    def finish(self) -> torch.Tensor:
        """Return (T, D)."""
        return self._summed()

    def compute(self, chunk: int) -> None:
        """Sum the experts' weighted results at their tokens."""
        experts, part = self._experts, self._dispatch.parts[chunk]
        rows = self._take("rows", self._values_TD, chunk)
        results = self._buffers["results"][: len(rows)]
        activations = experts.project_up(rows, self._activations.chunk(part.rows), part)
        hidden = experts.activate(activations, self._buffers["hidden"])
        experts.project_down(hidden, self._weights_R1[part.rows], results, part)
        self._sum(chunk, results)


class TensorBackward(_TensorPhase):
    """The backward phase."""

    _what = "the gradient of x"

    def __init__(self, inputs: PhaseInputs) -> None:
        super().__init__("backward", inputs)
        self._x_TD, weights_R1, pre_RH, gate_RH = inputs.saved
        self._activations = SavedActivations(pre_RH=pre_RH, gate_RH=gate_RH)
        self.grads = self.expert_grads(inputs, weights_R1, self._buffers)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x (T, D) and of the weights (T, K)."""
        grads_R = self.grads.weight_grads_R1.squeeze(1)
        grads_TK = of_pairs(grads_R, self._dispatch, self._weights_TK)
        name = "backward sum of the weights' gradients"
        self._reductions.append(self._context.communicator.all_reduce(grads_TK, name))
        return self._summed(), grads_TK

    def compute(self, chunk: int) -> None:
        """Sum the gradients of the experts' rows at their tokens."""
        part = self._dispatch.parts[chunk]
        rows = self._take("rows", self._x_TD, chunk)
        grads = self._take("grads", self._values_TD, chunk)
        self.grads.run(grads, rows, self._activations.chunk(part.rows), part, grads)
        self._sum(chunk, grads)
