"""The autograd function of every layer of experts, with the memory policy as an argument.

A token's way to the wire: `layer`, `gate`, **function**, `executor`, the policy's handlers
(`keep`, `reuse` for MPipeMoE's S1 to S4, `tensor` for PPMoE), `comm`. Here the policy makes a
phase's buffers and handlers, and the executor runs them. The backward pass has a schedule of its
own, because autograd's backward of chunked code does not overlap. Permutation, dispatch, experts
and combine are one function: with the permutation outside, rows would have to have the same order
backward as forward. `shared_work` cuts it in two where other work runs behind its exchanges.

T tokens, K choices, D model width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from moetune.runtime.delayed import add_gradient
from moetune.runtime.moe.executor import Executor, Handlers, PipelineContext, Schedule
from moetune.runtime.moe.expert_grads import ParameterGrads
from moetune.runtime.moe.experts import ExpertWeights, WantedGrads

Saved = tuple[Any, ...]
"""Tensors, or None."""
_NUM_PARAMETERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseInputs:
    """The inputs of a phase.

    Args:
        values_TD: x forward, the gradient of y backward.
        weights_TK: the combine weights.
        wanted: gradients of the parameters; none forward.
        saved: tensors that the forward phase saved; empty forward.
    """

    values_TD: torch.Tensor
    weights_TK: torch.Tensor
    experts: ExpertWeights
    wanted: WantedGrads = field(default_factory=WantedGrads)
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

    @property
    def grads(self) -> ParameterGrads:
        """The experts' backward."""

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

        Parameters of another dtype than x are cast here, and again in the backward pass: their
        gradients are then never rounded to the dtype of the step, and no copy of them is kept.

        Args:
            parameters: w1, b1, w2, b2 and w3 of the local experts, None where there is none.
        """
        # Not around this function: activation checkpointing ends a repeated pass by an exception
        # where its results are saved, and the buffers stay good.
        with during(policy, "a forward pass"):
            phase = start_forward(policy, x_TD, weights_TK, parameters)
            phase.executor.run(phase.schedule, phase)
            y_TD = phase.finish()
        save(ctx, policy, (weights_TK, *phase.saved), parameters)
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
                phase = run_backward(ctx, grad_TD)
                grad_x_TD, grad_weights_TK = phase.finish()
            finally:
                policy.release()
            return grad_x_TD, grad_weights_TK, None, *parameter_grads(ctx, phase)


def start_forward(
    policy: MemoryPolicy, x_TD: torch.Tensor, weights_TK: torch.Tensor, parameters: Sequence[Any]
) -> ForwardPhase:
    """Return a forward phase whose buffers are made."""
    experts = _cast(policy, parameters, x_TD.dtype)
    phase = policy.forward(PhaseInputs(values_TD=x_TD, weights_TK=weights_TK, experts=experts))
    phase.begin()
    return phase


@contextmanager
def during(policy: MemoryPolicy, phase: str) -> Iterator[None]:
    """Run a forward phase, or a part of one; where it fails, its memory is given back."""
    with policy.context.workspace.guard(phase):
        try:
            yield
        except BaseException:
            policy.release()
            raise


def save(
    ctx: Any,  # noqa: ANN401
    policy: MemoryPolicy,
    saved: Saved,
    parameters: Sequence[Any],
) -> None:
    """Save what the backward pass takes.

    Args:
        saved: the weights of the choices, and what the forward phase saved.
    """
    ctx.policy = policy
    if policy.context.weight_gradients is not None:
        ctx.parameters = parameters  # a checkpoint would return copies of saved ones
    ctx.save_for_backward(*saved, *parameters)


def run_backward(
    ctx: Any,  # noqa: ANN401
    grad_TD: torch.Tensor,
) -> BackwardPhase:
    """Return a backward phase whose steps are issued; its last results may still travel."""
    policy: MemoryPolicy = ctx.policy
    weights_TK, *saved = ctx.saved_tensors
    parameters = [saved.pop() for _ in range(_NUM_PARAMETERS)][::-1]
    inputs = PhaseInputs(
        values_TD=grad_TD, weights_TK=weights_TK, saved=tuple(saved),
        experts=_cast(policy, parameters, grad_TD.dtype),
        wanted=_wanted(policy, parameters, ctx.needs_input_grad[-_NUM_PARAMETERS:]),
    )  # fmt: skip
    phase = policy.backward(inputs)
    phase.begin()
    phase.executor.run(phase.schedule, phase)
    if policy.context.weight_gradients is None:
        phase.grads.finish()  # while the last results travel
    return phase


def parameter_grads(
    ctx: Any,  # noqa: ANN401
    phase: BackwardPhase,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the parameters; None where they wait for a later pass."""
    policy: MemoryPolicy = ctx.policy
    waiting = policy.context.weight_gradients
    if waiting is not None:
        waiting.put(partial(_add_later, policy, phase.grads, ctx.parameters))
        return (None,) * _NUM_PARAMETERS
    grads = tuple(phase.grads.totals())
    policy.context.gradients.sum_replicas(grads)
    return grads


def _add_later(
    policy: MemoryPolicy, made: ParameterGrads, parameters: Sequence[torch.Tensor | None]
) -> None:
    """Make the gradients of the parameters, and add them to theirs."""
    made.finish()
    grads = tuple(made.totals())
    policy.context.gradients.sum_replicas(grads)
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter is not None and grad is not None:
            add_gradient(parameter, grad)


def _cast(policy: MemoryPolicy, parameters: Sequence[Any], dtype: torch.dtype) -> ExpertWeights:
    """Return the parameters in the dtype of a step; copies are counted."""
    context = policy.context
    weights = ExpertWeights.of(context.activation, parameters, dtype, context.form)
    pairs = zip(weights.parameters, parameters, strict=True)
    copies = [cast for cast, each in pairs if cast is not None and cast.dtype != each.dtype]
    if copies:
        context.tracker.add(*copies)
    return weights


def _wanted(
    policy: MemoryPolicy, parameters: Sequence[Any], needs_grad: Sequence[bool]
) -> WantedGrads:
    dtypes = tuple(
        each.dtype if each is not None and is_needed else None
        for each, is_needed in zip(parameters, needs_grad, strict=True)
    )
    return WantedGrads(dtypes=dtypes, scale=policy.context.gradients.scale)
