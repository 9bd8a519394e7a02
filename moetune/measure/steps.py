"""Steps of a layer on a rank, which are made of random weights and tokens, run and timed.

`verify`, `trace` and measuring sessions run them, on ranks that `app.launch` starts.

T tokens, K choices, E experts, D model width.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.domain.layer import Workload
from moetune.domain.plan import SAFE_DECISION, Decision
from moetune.measure.sizes import expert_shares
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, TensorExpertLayer
from moetune.runtime.trace import RecordedSpan, SpanRecorder, TimelineRecorder

_WARM_UP_ROUNDS = 2
_SEED = 20240229
_MARGIN = 16.0
"""The margin of a token's chosen logits over all others, far above the spread of random logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """The times of steps with one decision.

    Args:
        forward_seconds, backward_seconds, step_seconds: the slowest rank's times by round.
        deviation: largest relative difference (2-norm) of output and gradients to one chunk's.
        imbalance: the busiest rank's rows divided by the mean over ranks.
    """

    decision: Decision
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    step_seconds: tuple[float, ...]
    deviation: float
    imbalance: float


class LayerSteps:
    """Single steps of a layer on this rank, always on the same input.

    Args:
        x_TD, grad_TD: tokens (T, D), and the gradient of the output (T, D).
        workload: workload of the layer.
    """

    def __init__(
        self, layer: ExpertLayer, x_TD: torch.Tensor, grad_TD: torch.Tensor, workload: Workload
    ) -> None:
        self.layer, self.workload = layer, workload
        self.x_TD = x_TD.detach().requires_grad_()
        self.grad_TD = grad_TD

    def run(self, decision: Decision) -> tuple[float, float, float]:
        """Run a step, and return the seconds of forward, backward and both."""
        self.layer.pin(decision)
        self._forget_grads()
        start = self._now()
        self.y_TD = self.layer(self.x_TD)
        middle = self._now()
        self.y_TD.backward(self.grad_TD)
        end = self._now()
        return middle - start, end - middle, end - start

    def once(self) -> None:
        """Run a step with the layer's present decision."""
        self._forget_grads()
        self.layer(self.x_TD).backward(self.grad_TD)

    def record(self, decision: Decision) -> tuple[RecordedSpan, ...]:
        """Run a step, and return the time spans of its parts on this rank."""
        self.layer.recorder = recorder = TimelineRecorder(self.x_TD.device)
        try:
            self.run(decision)
        finally:
            self.layer.recorder = SpanRecorder()
        return recorder.spans()

    def results(self) -> list[torch.Tensor]:
        """Return the last step's output and gradients."""
        grads = [self.x_TD.grad, *(parameter.grad for parameter in self.layer.parameters())]
        return [self.y_TD.detach(), *(grad.clone() for grad in grads if grad is not None)]

    def _forget_grads(self) -> None:
        self.layer.zero_grad(set_to_none=True)
        self.x_TD.grad = None

    def _now(self) -> float:
        if self.x_TD.is_cuda:
            torch.cuda.synchronize(self.x_TD.device)
        return time.perf_counter()


def random_steps(
    workload: Workload, *, device: torch.device, communicator: Communicator | None = None
) -> LayerSteps:
    """Return steps of a layer with random weights, tokens and output gradients.

    In a tensor-parallel group tokens and gradients are the same on all ranks. The gate's rows are
    orthonormal if there are at most d_model experts. Random tokens then choose all experts equally
    often, or by the workload's loads.

    Raises:
        InputError: tokens cannot follow the workload's routing.
    """
    shares = expert_shares(workload)
    dtype = getattr(torch, workload.dtype)
    shape = workload.layer
    torch.manual_seed(_SEED)
    is_tensor = workload.expert_parallel == "tensor"
    layer = _layer(workload, device=device, communicator=communicator)
    generator = torch.Generator().manual_seed(_SEED)
    if shape.num_experts <= shape.d_model:
        gate_DE = torch.randn(shape.d_model, shape.num_experts, generator=generator, device="cpu")
        with torch.no_grad():
            layer.gate.weight.copy_(torch.linalg.qr(gate_DE).Q.T)
    generator.manual_seed(_SEED + 1 + (0 if is_tensor else layer.communicator.rank))
    size = (workload.tokens_per_rank, shape.d_model)
    x_TD, grad_TD = (torch.randn(size, generator=generator, device="cpu") for _ in "xg")
    if shares is not None:
        experts_TK = drawn_experts(shares, shape.top_k, len(x_TD), generator)
        x_TD = _steer(x_TD, layer.gate.weight.detach().float().cpu(), experts_TK)
    x_TD, grad_TD = (tensor.to(device, dtype) for tensor in (x_TD, grad_TD))
    return LayerSteps(layer, x_TD, grad_TD, workload)


def drawn_experts(
    shares: Sequence[float], top_k: int, num_tokens: int, generator: torch.Generator
) -> torch.Tensor:
    """Return K different experts for each token (T, K), with each expert's share of the rows.

    By systematic sampling (Madow 1949), K evenly spaced values in the cumulative shares select
    experts. Evenly spread offsets of the tokens make the counts exact up to rounding.

    Args:
        shares: shares of all rows, at most 1/K each.
    """
    ends_E = torch.tensor(shares, dtype=torch.float64, device="cpu").mul(top_k).cumsum(0)
    ends_E[-1] = top_k
    order_T = torch.randperm(num_tokens, generator=generator, device="cpu")
    start_T1 = ((order_T + 0.5) / max(1, num_tokens)).double().unsqueeze(1)
    teeth_TK = start_T1 + torch.arange(top_k, dtype=torch.float64, device="cpu")
    return torch.searchsorted(ends_E, teeth_TK, right=True).clamp_(max=len(shares) - 1)


def _steer(x_TD: torch.Tensor, gate_ED: torch.Tensor, experts_TK: torch.Tensor) -> torch.Tensor:
    """Return the tokens, shifted so that the gate chooses these experts.

    Args:
        gate_ED: the gate's weight, with orthonormal rows.
    """
    wanted_TE = torch.zeros(len(x_TD), len(gate_ED), dtype=x_TD.dtype)
    return x_TD + wanted_TE.scatter_(1, experts_TK, _MARGIN) @ gate_ED.to(x_TD.dtype)


def _layer(
    workload: Workload, *, device: torch.device, communicator: Communicator | None
) -> ExpertLayer:
    shape = workload.layer
    kind = TensorExpertLayer if workload.expert_parallel == "tensor" else MoELayer
    return kind(
        shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k, activation=shape.activation,
        placement=workload.placement or None, device=device, dtype=getattr(torch, workload.dtype),
        communicator=communicator,
    )  # fmt: skip


def measure_steps(
    steps: LayerSteps, decisions: Sequence[Decision], *, num_rounds: int
) -> tuple[MeasuredSteps, ...]:
    """Time every decision once per round; each round begins with the next decision.

    All ranks call this together, and get the same result.
    """
    world = communicator_of(None)
    deviations = [_deviation(steps, decision) for decision in decisions]
    for _ in range(_WARM_UP_ROUNDS):
        for decision in decisions:
            steps.run(decision)
    seconds = torch.zeros(num_rounds, len(decisions), 3, dtype=torch.float64, device="cpu")
    for number in range(num_rounds):
        for place in range(len(decisions)):
            index = (number + place) % len(decisions)
            world.barrier("a round of steps")
            seconds[number, index] = torch.tensor(steps.run(decisions[index]), device="cpu")
    seconds = world.all_reduce_values(seconds, "times of steps", op="max")
    deviation = world.all_reduce_values(
        torch.tensor(deviations, device="cpu"), "deviations of steps", op="max"
    )
    imbalance = _imbalance(steps)
    return tuple(
        MeasuredSteps(
            decision=decision,
            forward_seconds=tuple(seconds[:, index, 0].tolist()),
            backward_seconds=tuple(seconds[:, index, 1].tolist()),
            step_seconds=tuple(seconds[:, index, 2].tolist()),
            deviation=float(deviation[index]),
            imbalance=imbalance,
        )
        for index, decision in enumerate(decisions)
    )


def _deviation(steps: LayerSteps, decision: Decision) -> float:
    steps.run(SAFE_DECISION)
    wanted = steps.results()
    steps.run(decision)
    return max(
        float((result - reference).double().norm() / reference.double().norm().clamp(min=1e-30))
        for result, reference in zip(steps.results(), wanted, strict=True)
    )


def _imbalance(steps: LayerSteps) -> float:
    layer = steps.layer
    places_TK = layer.dispatcher.places_of(layer.gate(steps.x_TD.detach()).experts_TK)
    num_places = layer.experts.local_experts * layer.communicator.num_ranks
    counts = torch.bincount(places_TK.reshape(-1), minlength=num_places).cpu()
    counts = communicator_of(None).all_reduce_values(counts, "the rows of all experts")
    rows_P = counts.view(layer.communicator.num_ranks, -1).sum(dim=1).double()
    return float(rows_P.max() / rows_P.mean())
