"""The part on layers: steps at each degree, predicted and measured, for models of Table III."""

import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.profiled import load
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.wired import layer_costs, predicted_seconds
from benchmarks.staged_link import HostStagedLink
from moetune import config
from moetune.app.launch import rank_device, run_on_ranks
from moetune.comm.group import Communicator, OneRank
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import Workload
from moetune.domain.plan import Decision
from moetune.domain.profile import Profile
from moetune.measure.steps import MeasuredSteps, measure_steps, random_steps


def run_layers(scale: Scale, folder: Path) -> None:
    """Measure every model, number of tokens and degree; a row each, as it is measured.

    Over the loopback, and where there are several devices over their link.
    """
    rows, profile = Rows(folder, "layers"), load(folder)
    for model in scale.models:
        for tokens in scale.tokens:
            for num_ranks in dict.fromkeys((1, scale.num_ranks)):
                workload = scale.workload(model, tokens, num_ranks)
                for steps in _measured(scale, workload):
                    rows.add(
                        model=model, tokens=tokens, ranks=num_ranks,
                        degree=steps.decision.forward_degree, macs=6 * workload.macs,
                        seconds=statistics.median(steps.step_seconds), deviation=steps.deviation,
                        predicted_seconds=_predicted(profile, workload, steps.decision),
                    )  # fmt: skip


def link(device: torch.device) -> Communicator:
    """Return the loopback of a GPU; on a CPU, none: rows stay where they are."""
    return HostStagedLink(device) if device.type == "cuda" else OneRank()


def _measured(scale: Scale, workload: Workload) -> tuple[MeasuredSteps, ...]:
    decisions = [Decision(forward_degree=count, backward_degree=count) for count in scale.degrees]
    if workload.world_size == 1:
        device = scale.torch_device
        steps = random_steps(workload, device=device, communicator=link(device))
        return measure_steps(steps, decisions, num_rounds=scale.num_rounds)
    measured: tuple[MeasuredSteps, ...] = run_on_ranks(
        _on_rank, (workload, decisions, scale.num_rounds),
        num_ranks=workload.world_size, launch=None, environ=config.environment(),
        oversubscribe=False,
    )  # fmt: skip
    return measured


def _on_rank(given: Any, _: object) -> tuple[MeasuredSteps, ...]:  # noqa: ANN401 - a tuple of the above
    workload, decisions, num_rounds = given
    steps = random_steps(workload, device=rank_device())
    return measure_steps(steps, decisions, num_rounds=num_rounds)


def _predicted(profile: Profile | None, workload: Workload, decision: Decision) -> float | None:
    if profile is None:
        return None
    try:
        costs = layer_costs(profile, workload)
    except MoetuneError:
        return None
    return predicted_seconds(costs, workload, decision)
