"""The part on published times: steps of layers with experts on this GPU alone, and their plans.

A plan of a reference machine is made from other people's tables before anything is measured. Here
its steps are run.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import Scale
from moetune.app.files import load_profile_file
from moetune.comm.group import OneRank
from moetune.domain.kernels import ExpertKernel
from moetune.domain.layer import Phase, Workload
from moetune.domain.plan import Decision
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.measure.kernels import other_kernels
from moetune.runtime.moe.layer import MoELayer
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import step_time

_ROUNDS, _WARM_UP = 7, 3
Times = dict[Phase, float]


def run_published(scale: Scale, folder: Path) -> None:
    """Run each layer in one chunk by every kernel, and in several; write a row each."""
    rows, profile = Rows(folder, "published"), profile_of(scale.torch_device)
    for shape, tokens in scale.published_layers:
        workload = Workload(
            layer=shape, world_size=1, tokens_per_rank=tokens, dtype=scale.dtype
        )  # fmt: skip
        layer = MoELayer(
            shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k, bias=False,
            activation=shape.activation, device=scale.torch_device,
            dtype=getattr(torch, scale.dtype), communicator=OneRank(),
        )  # fmt: skip
        others = other_kernels(workload, device=scale.torch_device)
        runs: list[tuple[int, ExpertKernel | None]] = [
            *((degree, None) for degree in scale.published_degrees),
            *((scale.published_degrees[0], kernel) for kernel in others),
        ]
        for degree, kernel in runs:
            layer.pin(Decision(forward_degree=degree, backward_degree=degree, kernel=kernel))
            rows.add(
                experts=shape.num_experts, d_model=shape.d_model, d_hidden=shape.d_hidden,
                top_k=shape.top_k, tokens=tokens, degree=degree, kernel=kernel or "usual",
                macs=3 * shape.num_gemms * workload.macs,
                **_measured(layer, workload, scale.torch_device),
                predicted_seconds=None if kernel else _predicted(profile, workload, degree),
                machine=None if profile is None else profile.name,
            )  # fmt: skip


def profile_of(device: torch.device) -> Profile | None:
    """Return the reference machine that has this device; None where there is none."""
    if device.type != "cuda":
        return None
    for path in sorted(Path("profiles").glob("*.toml")):
        profile = load_profile_file(path)
        if profile.machine.device == torch.cuda.get_device_name(device) and profile.tables:
            return profile
    return None


def _measured(layer: MoELayer, workload: Workload, device: torch.device) -> dict[str, float]:
    """Return the medians of both phases, and of the time in which the host issues them."""
    shape = workload.tokens_per_rank, workload.layer.d_model
    x_TD, grad_TD = torch.randn(2, *shape, device=device, dtype=getattr(torch, workload.dtype))
    x_TD = x_TD.requires_grad_()
    measured: dict[str, list[float]] = {}
    for _ in range(_WARM_UP + _ROUNDS):
        layer.zero_grad()
        y_TD, issued, forward = _timed(lambda: layer(x_TD), device)
        _, issued_backward, backward = _timed(lambda y=y_TD: y.backward(grad_TD), device)  # type: ignore[misc]
        for name, seconds in (
            ("forward_seconds", forward), ("backward_seconds", backward),
            ("host_forward_seconds", issued), ("host_backward_seconds", issued_backward),
        ):  # fmt: skip
            measured.setdefault(name, []).append(seconds)
    return {name: statistics.median(times[_WARM_UP:]) for name, times in measured.items()}


def _timed(
    run: Callable[[], torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, float, float]:
    """Return a result, when the host had issued it, and when it was done."""
    _synchronize(device)
    start = time.perf_counter()
    result = run()
    issued = time.perf_counter() - start
    _synchronize(device)
    return result, issued, time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _predicted(profile: Profile | None, workload: Workload, degree: int) -> float | None:
    if profile is None:
        return None
    costs = layer_costs(workload=workload, costs=costs_of(profile, allow_modelled=True))
    return step_time(
        costs=costs, tokens=workload.tokens_per_rank, strategy="none", degree=degree,
    ).seconds  # fmt: skip
