"""The autograd function of every layer of experts, with the memory policy as an argument.

A token's way to the wire: `layer`, `gate`, **function**, `executor`, the policy's handlers
(`keep`, `reuse` for MPipeMoE's S1 to S4, `tensor` for PPMoE), `comm`. Here the policy makes a
phase's buffers and handlers, and the executor runs them. The backward pass has a schedule of its
own, because autograd's backward of chunked code does not overlap. Permutation, dispatch, experts
and combine are one function: with the permutation outside, rows would have to have the same order
backward as forward.

T tokens, K choices, D model width.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from moetune.runtime.moe.executor import Executor, Handlers, PipelineContext, Schedule
from moetune.runtime.moe.experts import ExpertGrads, ExpertWeights

Saved = tuple[Any, ...]
"""Tensors, or None."""
_NUM_PARAMETERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseInputs:
    """The inputs of a phase.

    Args:
        values_TD: x forward, the gradient of y backward.
        weights_TK: the combine weights.
        saved: tensors that the forward phase saved; empty forward.
    """

    values_TD: torch.Tensor
    weights_TK: torch.Tensor
    experts: ExpertWeights
    saved: Saved = ()


class ForwardPhase(Handlers, Protocol):
    """A forward phase with its buffers.

    Attributes:
        saved: tensors for the backward phase, set by `finish`.
    """

    executor: Executor
    schedule: Schedule
    saved: Saved

    def begin(self) -> None:
        """Prepare the inputs of the first step."""

    def finish(self) -> torch.Tensor:
        """Return the weighted outputs (T, D), once everything has arrived."""


class BackwardPhase(Handlers, Protocol):
    """A backward phase with its buffers."""

    executor: Executor
    schedule: Schedule
    grads: ExpertGrads

    def begin(self) -> None:
        """Prepare the inputs of the first step."""

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x (T, D) and of the combine weights (T, K)."""


class MemoryPolicy(Protocol):
    """The choice of buffers, saved tensors and transfers of a step: makes its phases."""

    @property
    def context(self) -> PipelineContext:
        """The part of the step that does not depend on the policy."""

    def forward(self, inputs: PhaseInputs) -> ForwardPhase:
        """Make the buffers of the forward phase."""

    def backward(self, inputs: PhaseInputs) -> BackwardPhase:
        """Make the buffers of the backward phase."""

    def release(self) -> None:
        """Give borrowed memory back, after a backward pass or a failure."""


class ExpertFunction(torch.autograd.Function):
    """y = Σₖ weightₖ · expertₖ(x), in chunks whose transfers overlap computation."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        policy: MemoryPolicy,
        *parameters: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Return (T, D).

        Args:
            parameters: w1, b1, w2, b2 and w3 of the local experts, None where there is none.
        """
        try:
            experts = ExpertWeights.of(policy.context.activation, parameters)
            phase = policy.forward(
                PhaseInputs(values_TD=x_TD, weights_TK=weights_TK, experts=experts)
            )
            phase.begin()
            phase.executor.run(phase.schedule, phase)
            y_TD = phase.finish()
        except BaseException:
            policy.release()
            raise
        ctx.policy = policy
        ctx.save_for_backward(weights_TK, *phase.saved, *parameters)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TD: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, the weights and the parameters."""
        policy: MemoryPolicy = ctx.policy
        with policy.context.workspace.guard("a backward pass"):
            weights_TK, *saved = ctx.saved_tensors
            parameters = [saved.pop() for _ in range(_NUM_PARAMETERS)][::-1]
            experts = ExpertWeights.of(policy.context.activation, parameters)
            inputs = PhaseInputs(
                values_TD=grad_TD, weights_TK=weights_TK, experts=experts, saved=tuple(saved)
            )
            try:
                phase = policy.backward(inputs)
                phase.begin()
                phase.executor.run(phase.schedule, phase)
                grad_x_TD, grad_weights_TK = phase.finish()
            finally:
                policy.release()
            return grad_x_TD, grad_weights_TK, None, *phase.grads.totals()
