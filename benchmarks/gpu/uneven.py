"""The part on uneven loads: one kernel for all experts, even and uneven, and what is predicted."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import Scale
from moetune.domain.layer import LayerShape
from moetune.domain.samples import EvenForm, GemmForm, GemmPoint, uneven_form
from moetune.measure.device import Device, open_device
from moetune.solve.layer.operations import unevenness

FORMS: tuple[EvenForm, ...] = ("forward", "grad_input", "grad_weight")
_ROUNDS = 9
LAWS: Mapping[str, Callable[[int, int], float]] = MappingProxyType({
    "1/√i": lambda place, _: (place + 1) ** -0.5,
    "1/i": lambda place, _: 1 / (place + 1),
    "1/i²": lambda place, _: (place + 1) ** -2.0,
    "a quarter idle": lambda place, _: float(place % 4 > 0),
})  # fmt: skip
"""Loads by place and number of experts, in any unit."""


def run_uneven(scale: Scale, folder: Path) -> None:
    """Time every shape's three forms under each law, in turns, and write a row for each."""
    rows, device = Rows(folder, "uneven"), open_device()
    for shape in scale.uneven_layers:
        for total in scale.uneven_rows:
            for row in _measured(shape, total, device):
                rows.add(**row)


def shares_of(law: str, num_experts: int) -> list[float]:
    """Return each expert's share of all rows."""
    loads = [LAWS[law](place, num_experts) for place in range(num_experts)]
    return [load / sum(loads) for load in loads]


def _measured(shape: LayerShape, total: int, device: Device) -> list[dict[str, object]]:
    experts = shape.num_experts
    point = GemmPoint(
        dtype="bfloat16", num_experts=experts, rows=total // experts, d_in=shape.d_model,
        d_out=shape.d_hidden,
    )  # fmt: skip
    uneven = replace(point, product=uneven_form("forward"))
    loads = {"even": point.expert_rows, "half on one": uneven.expert_rows}
    for law in LAWS:
        loads[law] = tuple(int(total * share) for share in shares_of(law, experts))
    runs = _runs(point, loads, device)
    seconds = _in_turns(runs, device)
    return [
        {
            "num_experts": experts, "d_in": shape.d_model, "d_out": shape.d_hidden, "rows": total,
            "form": form, "law": law, "seconds": seconds[law, form],
            "even_seconds": seconds["even", form],
            "half_on_one_seconds": seconds["half on one", form],
            "predicted_seconds": _predicted(form, law, total, experts, seconds),
        }
        for law in LAWS
        for form in FORMS
    ]  # fmt: skip


def _predicted(
    form: GemmForm,
    law: str,
    rows: int,
    num_experts: int,
    seconds: Mapping[tuple[str, GemmForm], float],
) -> float:
    share = unevenness(form, shares_of(law, num_experts), rows=rows).item()
    return (1 - share) * seconds["even", form] + share * seconds["half on one", form]


def _runs(
    point: GemmPoint, loads: Mapping[str, Sequence[int]], device: Device
) -> dict[tuple[str, GemmForm], Callable[[], object]]:
    where, dtype = device.torch_device, getattr(torch, point.dtype)
    x = torch.randn(point.num_experts * point.rows, point.d_in, device=where, dtype=dtype)
    y = torch.randn(point.num_experts * point.rows, point.d_out, device=where, dtype=dtype)
    w = torch.randn(point.num_experts, point.d_in, point.d_out, device=where, dtype=dtype)
    made: dict[tuple[str, GemmForm], Callable[[], object]] = {}
    multiply = torch._grouped_mm  # noqa: SLF001 - no public name in 2.10
    for law, rows in loads.items():
        ends = torch.tensor(rows, device=where).cumsum(0).int()
        made[law, "forward"] = partial(multiply, x, w, offs=ends)
        made[law, "grad_input"] = partial(multiply, y, w.mT, offs=ends)
        made[law, "grad_weight"] = partial(multiply, x.T, y, offs=ends)
    return made


def _in_turns(
    runs: Mapping[tuple[str, GemmForm], Callable[[], object]], device: Device
) -> dict[tuple[str, GemmForm], float]:
    """Return the median time of each; each has every place in a round, as clocks drift."""
    seconds: dict[tuple[str, GemmForm], list[float]] = {key: [] for key in runs}
    order = list(runs)
    with device.use():
        for number in range(_ROUNDS):
            for key in order[number % len(order) :] + order[: number % len(order)]:
                device.seconds(lambda run=runs[key]: run())  # type: ignore[misc]
                seconds[key].append(device.seconds(lambda run=runs[key]: run()))  # type: ignore[misc]
    return {key: statistics.median(times) for key, times in seconds.items()}
