"""Run one phase's schedule: start transfers, and compute while they travel.

A token's way to the wire: `layer`, `gate`, `function`, **executor**, the policy's handlers (`keep`,
`reuse` or `tensor`), which start transfers here, `comm`. Every rank issues the same steps in the
same order, which follows from the plan and never from the data. No rank skips a chunk, even an
empty chunk, because the other ranks' collectives would wait for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch

from moetune.comm.group import Communicator, OneRank, Transfer
from moetune.domain.constraints import Order
from moetune.domain.layer import Activation, Phase
from moetune.runtime.moe.activations import FusedForm
from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.experts import ExpertGrads, ExpertWeights
from moetune.runtime.moe.pairs import PairWeights
from moetune.runtime.moe.token_rows import ReceivedTokens, RowSums
from moetune.runtime.moe.weight_grads import GradientMean, StepFactors
from moetune.runtime.moe.workspace import Workspace
from moetune.runtime.trace import SpanRecorder

Step = tuple[Literal["dispatch", "compute", "combine"], int]
Schedule = tuple[Step, ...]
Saved = tuple[Any, ...]
"""Tensors, or None."""
_INTERLEAVED_LEAD = 2


@cache
def pipelined_schedule(degree: int, order: Order) -> Schedule:
    """Return the steps of a phase in which each chunk has separate buffers.

    dispatch_first: D₁ … D_r, then E₁ C₁ E₂ C₂ … (PipeMoE Eq. 9–11).
    interleaved: two dispatches ahead, then D_{i+2} behind C_i (MPipeMoE §III-B).
    """
    lead = degree if order == "dispatch_first" else min(degree, _INTERLEAVED_LEAD)
    steps: list[Step] = [("dispatch", chunk) for chunk in range(lead)]
    for chunk in range(degree):
        if order == "interleaved" and chunk and chunk + 1 < degree:
            steps.append(("dispatch", chunk + 1))
        steps += [("compute", chunk), ("combine", chunk)]
    return tuple(steps)


@cache
def ring_schedule(degree: int) -> Schedule:
    """Return the steps of a forward phase in ring buffers: D_{i+2} before C_i.

    The next dispatch goes first, because the experts wait for it and not for the combine. It may
    then take as long as the experts compute, instead of half of that. MPipeMoE's order, C_i first,
    lost up to 12 % if a dispatch takes between half and all of the experts' time.
    """
    steps: list[Step] = [("dispatch", chunk) for chunk in range(min(degree, _INTERLEAVED_LEAD))]
    for chunk in range(degree):
        steps.append(("compute", chunk))
        if chunk + _INTERLEAVED_LEAD < degree:
            steps.append(("dispatch", chunk + _INTERLEAVED_LEAD))
        steps.append(("combine", chunk))
    return tuple(steps)


def local_schedule(degree: int) -> Schedule:
    """Return the steps of a phase without dispatch, for ranks that have all rows."""
    return tuple(step for i in range(degree) for step in (("compute", i), ("combine", i)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineContext:
    """The parts that both phases of a step share, without the memory policy.

    Args:
        form: form of fused experts, used instead of the activation.
    """

    communicator: Communicator
    activation: Activation
    recorder: SpanRecorder
    workspace: Workspace
    gradients: GradientMean = field(default_factory=GradientMean)
    form: FusedForm | None = None

    def weights(self, parameters: Sequence[Any], dtype: torch.dtype) -> ExpertWeights:
        """Return the experts' parameters in the dtype of a step.

        Args:
            parameters: as in `ExpertWeights.of`.
        """
        return ExpertWeights.of(self.activation, parameters, dtype, self.form)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseInputs:
    """The inputs of a phase.

    Args:
        context, dispatch: the step's context and dispatch.
        values_TD: forward x, backward the gradient of y.
        weights_TK: the combine weights.
        grad_dtypes: dtype of each parameter's gradient, None if it is not wanted; empty forward.
        saved: tensors that the forward phase saved; empty forward.
    """

    context: PipelineContext
    dispatch: Dispatch
    values_TD: torch.Tensor
    weights_TK: torch.Tensor
    experts: ExpertWeights
    grad_dtypes: Sequence[torch.dtype | None] = ()
    saved: Saved = ()


class PhaseRun(ABC):
    """A phase of a step, with its buffers and the transfers that its steps start.

    Attributes:
        saved: in a forward phase, tensors for the backward phase, set by `finish`.
        grads: in a backward phase, the experts' backward.
    """

    schedule: Schedule
    saved: Saved = ()
    grads: ExpertGrads

    def __init__(self, phase: Phase, inputs: PhaseInputs) -> None:
        self._context = inputs.context
        self._dispatch, self._experts = inputs.dispatch, inputs.experts
        self._values_TD, self._weights_TK = inputs.values_TD, inputs.weights_TK
        self._phase: Phase = phase
        # Subclasses of one rank model a wire.
        self._is_local = type(inputs.context.communicator) is OneRank
        self._arriving: dict[int, list[Transfer]] = {}

    def expert_grads(
        self,
        inputs: PhaseInputs,
        weights_R1: torch.Tensor,
        buffers: Mapping[str, torch.Tensor],
        factors: StepFactors | None = None,
    ) -> ExpertGrads:
        """Return the experts' backward.

        Args:
            weights_R1, buffers, factors: as in `ExpertGrads`.
        """
        return ExpertGrads(
            inputs.experts, inputs.grad_dtypes, weights_R1, self._dispatch.degree, buffers,
            scale=self._context.gradients.scale, factors=factors,
        )  # fmt: skip

    def begin(self) -> None:  # noqa: B027 - most phases have nothing to prepare
        """Prepare the inputs of the first step."""

    def dispatch(self, chunk: int) -> None:  # noqa: B027 - without an exchange there is none
        """Send the chunk's rows to their experts."""

    @abstractmethod
    def compute(self, chunk: int) -> None:
        """Run the experts on the rows that arrived."""

    @abstractmethod
    def combine(self, chunk: int) -> None:
        """Send the results back, or sum them over the ranks."""

    @abstractmethod
    def finish(self) -> Any:  # noqa: ANN401 - as the phase
        """Return the phase's results, once everything has arrived.

        These are the weighted outputs (T, D) forward, and backward the gradients of x (T, D) and of
        the combine weights (T, K).
        """

    def run(self) -> None:
        """Issue all steps. Computations wait for their chunk; combines may end after the return.

        Raises:
            CollectiveError: an exchange failed; the text names the exchange and the chunk.
        """
        self.begin()
        for step, chunk in self.schedule:
            if step == "dispatch":
                self.dispatch(chunk)
            elif step == "combine":
                self.combine(chunk)
            else:
                for transfer in self._arriving.pop(chunk, ()):
                    transfer.wait()
                with self._context.recorder.compute(self._phase, "experts", chunk):
                    self.compute(chunk)

    def start(
        self, step: str, chunk: int, issue: Callable[[str], Transfer], *, num_bytes: int
    ) -> Transfer:
        """Start a transfer and record it.

        Args:
            step: step of the schedule, or the policy's name for the transfer.
            issue: starts the transfer, given its name for errors.
            num_bytes: bytes that this rank sends.
        """
        transfer = issue(f"{self._phase} {step} {chunk + 1} of {self._dispatch.degree}")
        return self._context.recorder.transfer(self._phase, step, chunk, transfer, num_bytes)


class DispatchedPhase(PhaseRun):
    """A phase with all-to-alls: rows go to their experts; results and weights' gradients come back.

    On a single rank nothing travels, and no transfer is recorded.
    """

    _received: ReceivedTokens | None = None  # forward, once the weights have arrived

    def __init__(self, phase: Phase, inputs: PhaseInputs) -> None:
        super().__init__(phase, inputs)
        self._sends_tokens = inputs.dispatch.places_N is not None
        self._weights = PairWeights(inputs.dispatch, inputs.context.communicator)

    def send(self, chunk: int, rows: torch.Tensor, into: torch.Tensor) -> Transfer:
        """Start sending a chunk's rows to their experts; its computation waits for them."""
        transfer = self._exchange("dispatch", chunk, rows, into)
        self._arriving.setdefault(chunk, []).append(transfer)
        return transfer

    def send_back(self, chunk: int, results: torch.Tensor, into: torch.Tensor) -> Transfer:
        """Start sending a chunk's results back."""
        return self._exchange("combine", chunk, results, into)

    def begin(self) -> None:
        """Start sending the combine weights; the first computation of experts waits for them."""
        if self._phase == "forward":
            self._arriving[0] = [self._start_weights(self._weights.send, self._weights_TK)]

    def arrived_weights(self) -> torch.Tensor:
        """Return the combine weights at the experts (R, 1), once they are there."""
        weights_R1, self._received = self._weights.arrived(self._weights_TK.dtype)
        return weights_R1

    def saved_places(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that expand rows of tokens again in the backward phase."""
        return () if self._received is None else self._received.tensors

    def restore_places(self, saved: Sequence[Any]) -> Sequence[Any]:
        """Take the tensors of `saved_places` from the front of `saved`; return the rest."""
        if not self._sends_tokens:
            return saved
        places_R, order, starts, *rest = saved
        sums = RowSums(order=order, starts=starts)
        self._received = ReceivedTokens(places_R=places_R, sums=sums)
        return rest

    def send_weights_back(self) -> Transfer:
        """Start sending the gradients of the combine weights of all chunks back."""
        return self._start_weights(self._weights.send_back, self.grads.weight_grads_R1)

    def _start_weights(
        self, issue: Callable[[torch.Tensor, str], Transfer], weights: torch.Tensor
    ) -> Transfer:
        transfer = issue(weights, f"{self._phase} combine weights")
        if self._is_local:
            return transfer
        num_bytes = self._weights_TK.nbytes
        return self._context.recorder.transfer(self._phase, "weights", 0, transfer, num_bytes)

    def _exchange(self, step: str, chunk: int, rows: torch.Tensor, into: torch.Tensor) -> Transfer:
        counts = self._dispatch.counts.travelling
        give, take = counts.send_CP[chunk], counts.receive_CP[chunk]
        if step == "combine":
            give, take = take, give
        exchange = self._context.communicator.all_to_all
        return self.start(
            step, chunk, lambda name: exchange(into, rows, take, give, name),
            num_bytes=rows.nbytes,
        )  # fmt: skip
