"""The GPU's part on memory reuse: peaks, times and choices of S1 to S4 over the loopback."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.mpipemoe.live import live_tensors
from moetune.comm.group import Communicator
from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import Workload
from moetune.domain.plan import Decision
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.times import paper_seconds, step_time
from moetune.workflows.steps import LayerSteps, measure_steps, random_steps

DEGREES = (4, 8)
_NUM_ROUNDS = 7
_MIB = 2**20
_HEADER = (
    "| strategy | degree | predicted ms | measured ms | error | peak forward MiB | backward MiB "
    "| Eq. 4 to 6 MiB | hidden ms | Eq. 10 ms |"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseRow:
    """One strategy and degree.

    Args:
        forward_peak_bytes, backward_peak_bytes: of the phase, beyond what there was before the
            step.
        formula_bytes: activations and buffers by Eq. 4 to 6.
        hidden_seconds: by how much the step is shorter than all its operations measured alone.
        paper_seconds: Eq. 10.
    """

    strategy: Strategy
    degree: int
    predicted_seconds: float
    seconds: float
    forward_peak_bytes: int
    backward_peak_bytes: int
    formula_bytes: int
    hidden_seconds: float
    paper_seconds: float


def reuse_rows(
    workload: Workload, *, device: torch.device, communicator: Communicator, costs: LayerCosts
) -> Iterator[ReuseRow]:
    """Measure every strategy at every degree, taking turns.

    Args:
        costs: with the loopback taken for a link between two ranks.
    """
    steps = random_steps(workload, device=device, communicator=communicator)
    decisions = [
        Decision(forward_degree=degree, backward_degree=degree, strategy=strategy)
        for strategy in STRATEGIES
        for degree in DEGREES
    ]
    tokens = workload.tokens_per_rank
    for one in measure_steps(steps, decisions, num_rounds=_NUM_ROUNDS):
        strategy, degree = one.decision.strategy, one.decision.forward_degree
        predicted = step_time(
            costs=costs, tokens=tokens, forward_degree=degree, backward_degree=degree,
            strategy=strategy,
        )  # fmt: skip
        alone = predicted.forward.work_seconds + predicted.backward.work_seconds
        seconds = statistics.median(one.step_seconds)
        memory = layer_memory(
            workload=workload, forward_degree=degree, backward_degree=degree, strategy=strategy
        )
        forward_peak, backward_peak = _peak_bytes(steps, one.decision, device)
        yield ReuseRow(
            strategy=strategy,
            degree=degree,
            predicted_seconds=predicted.seconds,
            seconds=seconds,
            forward_peak_bytes=forward_peak,
            backward_peak_bytes=backward_peak,
            formula_bytes=memory.activation_bytes + memory.buffer_bytes,
            hidden_seconds=alone + predicted.overhead.seconds - seconds,
            paper_seconds=paper_seconds(costs=costs, strategy=strategy, tokens=tokens),
        )


def reuse_table(rows: Sequence[ReuseRow], *, title: str) -> list[str]:
    """Return the lines of a Markdown section."""
    reused = [row for row in rows if row.strategy != "none"]
    best = min(reused, key=lambda row: row.seconds).strategy
    ours = min(reused, key=lambda row: row.predicted_seconds).strategy
    paper = min(reused, key=lambda row: row.paper_seconds).strategy
    said = (
        f"Of S1 to S4 the timeline takes {ours}, Eq. 10 takes {paper}, and {best} was measured "
        "fastest. Peaks are of one step beyond weights, input and what the layer keeps; hidden is "
        "what overlap saves of all operations as the profile measured them alone."
    )
    lines = [
        "",
        f"## Memory reuse, {title}",
        "",
        said,
        "",
        _HEADER,
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return lines + [
        f"| {row.strategy} | {row.degree} | {row.predicted_seconds * 1e3:.2f} "
        f"| {row.seconds * 1e3:.2f} | {row.predicted_seconds / row.seconds - 1:+.1%} "
        f"| {row.forward_peak_bytes / _MIB:.0f} | {row.backward_peak_bytes / _MIB:.0f} "
        f"| {row.formula_bytes / _MIB:.0f} "
        f"| {row.hidden_seconds * 1e3:.2f} | {row.paper_seconds * 1e3:.2f} |"
        for row in rows
    ]


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
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y_TD = layer(x_TD)
    torch.cuda.synchronize()
    forward_peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    y_TD.backward(steps.grad_TD)
    torch.cuda.synchronize()
    return forward_peak, torch.cuda.max_memory_allocated() - before
