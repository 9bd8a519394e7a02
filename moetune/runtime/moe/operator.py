"""A layer's step as two operators, for `torch.compile` and selective checkpointing.

    moetune::routed_experts            rows and their routing in, weighted outputs out
    moetune::routed_experts_backward   their gradients

Both serve code that works on single operators. A compiler cannot trace exchanges whose sizes depend
on the tokens, and checkpointing policies keep an operator's results. The operators run the
functions of `ExpertFunction`, which the layer calls directly without a compiler or such a policy.

An operator takes and returns tensors. The layer, and what a step keeps for its backward pass, are
attributes of one-byte tensors' storage. They live as long as a graph holds those tensors. A step
keeps none of its operator's inputs, because a compiled graph may reuse their memory. The graph
passes the inputs to the backward operator.

T tokens, K choices, D model width.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moetune.domain.errors import InputError
from moetune.runtime.moe.function import ExpertFunction, MemoryPolicy
from moetune.runtime.moe.gate import Routing
from moetune.runtime.plans.timers import Watch

_NUM_PARAMETERS = 5


def handle_of(layer: nn.Module) -> torch.Tensor:
    """Return the tensor by which operators find a `PlannedLayer`, while the layer lives."""
    return _carrier(weakref.ref(layer))


def run_as_operator(
    handle: torch.Tensor,
    routing: Routing,
    problem: str,
    gradients: str,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    parameters: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Return Σₖ weightₖ · expertₖ(x) for a step's routing (T, D).

    Args:
        handle: handle of the layer.
        problem, gradients: as in `start_step`.
        parameters: as in `ExpertFunction`.
    """
    y_TD, _ = torch.ops.moetune.routed_experts(
        handle, x_TD, weights_TK, routing.experts_TK, routing.kept_TK, *parameters,
        problem, gradients, torch.is_grad_enabled(),
    )  # fmt: skip
    result: torch.Tensor = y_TD
    return result


class _SavedStep:
    """What a step's backward pass needs and no graph has; it replaces autograd's context."""

    policy: MemoryPolicy
    is_averaged: bool
    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def __init__(self, watch: Watch, x_TD: torch.Tensor) -> None:
        self.watch, self._x_TD = watch, x_TD
        self._saved: list[torch.Tensor | None] = []
        self._is_x: list[bool] = []

    def save_for_backward(self, *tensors: Any) -> None:  # noqa: ANN401 - tensors, or None
        """Keep the tensors that the phase saved, without the operator's inputs."""
        saved = tensors[1:-_NUM_PARAMETERS]
        self._is_x = [tensor is self._x_TD for tensor in saved]
        self._saved = [None if tensor is self._x_TD else tensor for tensor in saved]
        del self._x_TD

    def backward(
        self,
        grad_TD: torch.Tensor,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        parameters: Sequence[torch.Tensor | None],
        needs: Sequence[bool],
    ) -> list[torch.Tensor]:
        """Return the gradients of x, of the weights, and of the parameters that need a gradient."""
        pairs = zip(self._saved, self._is_x, strict=True)
        saved = [x_TD if is_x else tensor for tensor, is_x in pairs]
        self.saved_tensors = weights_TK, *saved, *parameters
        self.needs_input_grad = (True, True, False, *needs)  # x, weights, policy, parameters
        self.watch.begin_backward()
        try:
            grads = ExpertFunction.backward(self, grad_TD)
        finally:
            self.saved_tensors = ()
        self.watch.end_backward()
        return [grad for grad in grads if grad is not None]


@torch.library.custom_op(
    "moetune::routed_experts", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _routed_experts(
    layer: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    kept_TK: torch.Tensor | None,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    w3: torch.Tensor | None,
    problem: str,
    gradients: str,
    trains: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs (T, D), and the tensor by which the backward operator finds the step."""
    given = Routing(x_TD=x_TD, weights_TK=weights_TK, experts_TK=experts_TK, kept_TK=kept_TK)
    with torch.set_grad_enabled(trains):
        started = _carried(layer)().start_step(x_TD, x_TD.dtype, lambda: given, problem, gradients)
        step = _SavedStep(started.watch, x_TD)
        step.watch.begin()
        y_TD = ExpertFunction.forward(step, x_TD, weights_TK, started.policy, w1, b1, w2, b2, w3)
        if trains:
            step.watch.note_forward()
    return y_TD, _carrier(step if trains else None)


@_routed_experts.register_fake
def _(layer: torch.Tensor, x_TD: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return x_TD.new_empty(x_TD.shape), torch.empty_like(layer)


@torch.library.custom_op(
    "moetune::routed_experts_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _routed_experts_backward(
    step: torch.Tensor,
    grad_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    w3: torch.Tensor | None,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    """Return the gradients of x (T, D), the weights (T, K), and parameters that need gradients."""
    saved: _SavedStep = _carried(step)
    return saved.backward(grad_TD, x_TD, weights_TK, (w1, b1, w2, b2, w3), needs)


@_routed_experts_backward.register_fake
def _(
    _step: torch.Tensor,
    _grad_TD: torch.Tensor,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    *parameters_and_needs: Any,  # noqa: ANN401
) -> list[torch.Tensor]:
    *parameters, needs = parameters_and_needs
    wanted = [value for value, is_needed in zip(parameters, needs, strict=True) if is_needed]
    return [x_TD.new_empty(x_TD.shape), weights_TK.new_empty(weights_TK.shape)] + [
        torch.empty_like(value) for value in wanted
    ]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:  # noqa: ANN401
    _, x_TD, weights_TK, _, _, *parameters = inputs[: 5 + _NUM_PARAMETERS]
    ctx.save_for_backward(output[1], x_TD, weights_TK, *parameters)


def _differentiate(ctx: Any, grad_TD: torch.Tensor, _: object) -> tuple[Any, ...]:  # noqa: ANN401
    step, x_TD, weights_TK, *parameters = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[5 : 5 + _NUM_PARAMETERS])
    grad_x_TD, grad_TK, *made = torch.ops.moetune.routed_experts_backward(
        step, grad_TD, x_TD, weights_TK, *parameters, needs
    )
    grads = iter(made)
    return (
        None, grad_x_TD, grad_TK, None, None,
        *(next(grads) if is_needed else None for is_needed in needs), None, None, None,
    )  # fmt: skip


_routed_experts.register_autograd(_differentiate, setup_context=_set_up)


def _carrier(value: object) -> torch.Tensor:
    """Return a tensor whose storage carries an object, for as long as the storage lives."""
    made = torch.empty(1, dtype=torch.uint8, device="cpu")
    made.untyped_storage().carried = value  # type: ignore[attr-defined]
    return made


def _carried(tensor: torch.Tensor) -> Any:  # noqa: ANN401
    """Return the object in a tensor's storage; InputError if saved-tensor hooks copied that."""
    value = getattr(tensor.untyped_storage(), "carried", None)
    if value is None:
        raise InputError(
            "a layer's step was saved for the backward pass as a copy, as by "
            "torch.autograd.graph.save_on_cpu, and a copy has not what the step kept",
            "leave such hooks out around the layer, or around its compiled block",
        )
    return value
