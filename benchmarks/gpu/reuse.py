"""The part on memory reuse: peaks, times and choices of S1 to S4 over the loopback."""

import statistics
from pathlib import Path

import torch

from benchmarks.gpu.layers import link
from benchmarks.gpu.profiled import load
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.wired import wired
from benchmarks.mpipemoe.live import live_tensors
from moetune.domain.constraints import STRATEGIES
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import Workload
from moetune.domain.plan import Decision
from moetune.domain.profile import Profile
from moetune.measure.steps import LayerSteps, measure_steps, random_steps
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.plan import paper_seconds
from moetune.solve.layer.times import step_time


def run_reuse(scale: Scale, folder: Path) -> None:
    """Measure every strategy at every degree for the largest model, and write a row each."""
    rows, profile = Rows(folder, "reuse"), load(folder)
    model, tokens = list(scale.models)[-1], scale.tokens[-1]
    workload, device = scale.workload(model, tokens), scale.torch_device
    steps = random_steps(workload, device=device, communicator=link(device))
    decisions = [
        Decision(forward_degree=degree, backward_degree=degree, strategy=strategy)
        for strategy in STRATEGIES
        for degree in scale.reuse_degrees
    ]
    for measured in measure_steps(steps, decisions, num_rounds=scale.num_rounds):
        decision = measured.decision
        memory = layer_memory(
            workload=workload, degree=decision.degree, strategy=decision.strategy,
        )  # fmt: skip
        forward_bytes, backward_bytes = _peak_bytes(steps, decision, device)
        rows.add(
            model=model, tokens=tokens, strategy=decision.strategy,
            degree=decision.forward_degree, seconds=statistics.median(measured.step_seconds),
            forward_peak_bytes=forward_bytes, backward_peak_bytes=backward_bytes,
            formula_bytes=memory.activation_bytes + memory.buffer_bytes,
            **_predictions(profile, workload, decision),
        )  # fmt: skip


def _predictions(
    profile: Profile | None, workload: Workload, decision: Decision
) -> dict[str, float]:
    """Return the predicted step, all its operations one after the other, and Eq. 10."""
    if profile is None:
        return {}
    tokens, degree = workload.tokens_per_rank, decision.forward_degree
    try:
        costs = wired(profile, workload)
        step = step_time(
            costs=costs, tokens=tokens, degree=degree,
            strategy=decision.strategy,
        )  # fmt: skip
        paper = paper_seconds(costs=costs, strategy=decision.strategy, tokens=tokens)
    except MoetuneError:
        return {}
    alone = step.forward.work_seconds + step.backward.work_seconds + step.overhead.seconds
    return {"predicted_seconds": step.seconds, "alone_seconds": alone, "paper_seconds": paper}


def _peak_bytes(steps: LayerSteps, decision: Decision, device: torch.device) -> tuple[int, int]:
    """Return the peaks of the forward and of the backward pass of one step."""
    steps.run(decision)
    layer, x_TD = steps.layer, steps.x_TD
    layer.zero_grad(set_to_none=True)
    x_TD.grad = None
    if device.type != "cuda":
        with live_tensors() as forward:
            y_TD = layer(x_TD)
        with live_tensors() as backward:
            y_TD.backward(steps.grad_TD)
        return forward.peak_bytes, forward.left_bytes + backward.peak_bytes
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    y_TD = layer(x_TD)
    torch.cuda.synchronize(device)
    forward_peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    y_TD.backward(steps.grad_TD)
    torch.cuda.synchronize(device)
    return forward_peak, torch.cuda.max_memory_allocated(device) - before
