"""One autograd function for every layer of experts, with the memory policy as an argument.

A token's way to the wire: `layer`, `gate`, **function**, `executor`, the policy's handlers
(`keep`, `reuse` for MPipeMoE's S1 to S4, `tensor` for PPMoE), `comm`. Here the policy makes a
phase's buffers and handlers, and the executor runs them. The backward pass has a schedule of its
own, because autograd's backward of chunked code does not overlap.

T tokens, K choices, D model width.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.layer import Activation
from moetune.runtime.moe.executor import Executor, Handlers, PipelineContext, Schedule
from moetune.runtime.moe.experts import ExpertGrads, ExpertWeights

Saved = tuple[torch.Tensor | None, ...]
_NUM_PARAMETERS = 5


class ForwardPhase(Handlers, Protocol):
    """A forward phase whose buffers are made.

    Attributes:
        saved: what the policy keeps for the backward pass.
    """

    executor: Executor
    schedule: Schedule
    saved: Saved

    def begin(self) -> None:
        """Prepare what the first step needs."""
        ...

    def finish(self) -> torch.Tensor:
        """Return the weighted outputs (T, D), once everything has arrived."""
        ...


class BackwardPhase(Handlers, Protocol):
    """A backward phase whose buffers are made."""

    executor: Executor
    schedule: Schedule
    grads: ExpertGrads

    def begin(self) -> None:
        """Prepare what the first step needs."""
        ...

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x (T, D) and of the combine weights (T, K)."""
        ...


class MemoryPolicy(Protocol):
    """Which buffers chunks use, what the backward pass finds, and how a chunk travels."""

    @property
    def context(self) -> PipelineContext:
        """What both phases share."""
        ...

    @property
    def activation(self) -> Activation:
        """Of the experts."""
        ...

    def forward(
        self, x_TD: torch.Tensor, weights_TK: torch.Tensor, experts: ExpertWeights
    ) -> ForwardPhase:
        """Return the forward phase."""
        ...

    def backward(
        self,
        grad_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        saved: Sequence[Any],
        experts: ExpertWeights,
    ) -> BackwardPhase:
        """Return the backward phase.

        Args:
            saved: by the forward phase.
        """
        ...

    def release(self) -> None:
        """Give back what the policy borrowed, after a backward pass or a failure."""
        ...


class ExpertFunction(torch.autograd.Function):
    """y = Σₖ weights · expert(x), in chunks whose transfers hide behind computation."""

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
            phase = policy.forward(x_TD, weights_TK, _experts(policy, parameters))
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
            saved, parameters = saved[:-_NUM_PARAMETERS], saved[-_NUM_PARAMETERS:]
            try:
                phase = policy.backward(grad_TD, weights_TK, saved, _experts(policy, parameters))
                phase.begin()
                phase.executor.run(phase.schedule, phase)
                grad_x_TD, grad_weights_TK = phase.finish()
            finally:
                policy.release()
            return grad_x_TD, grad_weights_TK, None, *phase.grads.totals()


def _experts(policy: MemoryPolicy, parameters: Sequence[Any]) -> ExpertWeights:
    w1, b1, w2, b2, w3 = parameters
    return ExpertWeights(activation=policy.activation, w1=w1, b1=b1, w2=w2, b2=b2, w3=w3)
