"""The autograd function of every layer of experts, with the memory policy as an argument.

A token's way to the wire: `layer`, `gate`, **function**, `executor`, the policy's handlers (`keep`,
`reuse` for MPipeMoE's S1 to S4, `tensor` for PPMoE), `comm`. Here the policy makes a phase's
buffers and handlers, and the executor runs them. The backward pass has its schedule, because
autograd's backward of chunked code does not overlap. Permutation, dispatch, experts and combine are
one function. With the permutation outside, rows would need the same order backward as forward.

T tokens, K choices, D model width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.executor import PhaseInputs, PhaseRun, PipelineContext
from moetune.runtime.plans.timers import Watch

_NUM_PARAMETERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """A step's choice of buffers, saved tensors and transfers.

    Args:
        context, dispatch: the part of the step that does not depend on the policy.
        forward, backward: make the buffers of a phase.
        release: gives borrowed memory back, after a backward pass or a failure.
    """

    context: PipelineContext
    dispatch: Dispatch
    forward: Callable[[PhaseInputs], PhaseRun]
    backward: Callable[[PhaseInputs], PhaseRun]
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step that all ranks agree on, with its tokens (T, D), combine weights (T, K) and policy."""

    x_TD: torch.Tensor
    weights_TK: torch.Tensor
    policy: MemoryPolicy
    watch: Watch

    def run(
        self, x_TD: torch.Tensor, weights_TK: torch.Tensor, parameters: Sequence[Any]
    ) -> torch.Tensor:
        """Return Σₖ weightₖ · expertₖ(x) for this step's routing (T, D), and time it.

        Args:
            parameters: as in `ExpertFunction`.
        """
        self.watch.begin()
        y_TD: torch.Tensor = ExpertFunction.apply(  # type: ignore[no-untyped-call]
            x_TD, weights_TK, self.policy, *parameters
        )
        self.watch.end_forward(y_TD)
        return y_TD


class ExpertFunction(torch.autograd.Function):
    """The function y = Σₖ weightₖ · expertₖ(x), in chunks whose transfers overlap computation."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        policy: MemoryPolicy,
        *parameters: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Return the weighted outputs y (T, D).

        Parameters of another dtype than x are cast here, and again in the backward pass. Their
        gradients are then never rounded to the step's dtype, and no cast copy is kept.

        Args:
            parameters: w1, b1, w2, b2 and w3 of the local experts; None for a missing parameter.
        """
        # Not around this function: activation checkpointing ends a repeated pass by an exception
        # where its results are saved, and the buffers stay good.
        with policy.context.workspace.guard("a forward pass"):
            try:
                phase = policy.forward(
                    PhaseInputs(
                        context=policy.context, dispatch=policy.dispatch, values_TD=x_TD,
                        weights_TK=weights_TK,
                        experts=policy.context.weights(parameters, x_TD.dtype),
                    )
                )  # fmt: skip
                phase.run()
                y_TD: torch.Tensor = phase.finish()
            except BaseException:
                policy.release()
                raise
        ctx.policy = policy
        ctx.is_averaged = policy.context.gradients.is_due()
        if ctx.is_averaged:
            ctx.parameters = parameters  # a checkpoint would return copies of saved parameters
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
            try:
                phase = _run_backward(ctx, grad_TD)
                grads = phase.finish()
            finally:
                policy.release()
            if ctx.is_averaged:
                policy.context.gradients.average(ctx.parameters)
            parameter_grads = phase.grads.totals()
        return *grads, None, *parameter_grads


def _run_backward(
    ctx: Any,  # noqa: ANN401
    grad_TD: torch.Tensor,
) -> PhaseRun:
    """Run a backward phase's steps and return it; its last results may still travel."""
    policy: MemoryPolicy = ctx.policy
    weights_TK, *saved = ctx.saved_tensors
    saved, parameters = saved[:-_NUM_PARAMETERS], saved[-_NUM_PARAMETERS:]
    needs = ctx.needs_input_grad[-_NUM_PARAMETERS:]
    dtypes = [
        parameter.dtype if is_needed else None
        for parameter, is_needed in zip(parameters, needs, strict=True)
    ]
    inputs = PhaseInputs(
        context=policy.context, dispatch=policy.dispatch,
        values_TD=grad_TD, weights_TK=weights_TK, saved=tuple(saved),
        experts=policy.context.weights(parameters, grad_TD.dtype),
        grad_dtypes=dtypes,
    )  # fmt: skip
    phase = policy.backward(inputs)
    phase.run()
    phase.grads.finish()  # while the last results travel
    return phase
