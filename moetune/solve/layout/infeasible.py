"""Error where no layout fits: the smallest one with its memory, and a change that would fit."""

from dataclasses import replace

from moetune.domain.constraints import LayoutPins
from moetune.domain.errors import InfeasiblePlanError, InputError
from moetune.domain.layout import AXES, Layout
from moetune.domain.request import PlanInputs
from moetune.domain.units import format_bytes
from moetune.solve.layout.candidates import Unfit
from moetune.solve.layout.chunked import can_offload
from moetune.solve.layout.search import LayoutSearch
from moetune.solve.layout.space import find_layouts, whole_batch
from moetune.solve.layout.words import name_layout, name_memory, name_setting


def nothing_fits(
    smallest: Unfit, *, limit_bytes: int, host_bytes: int | None, hint: str
) -> InfeasiblePlanError:
    """Return the error that names the layout with the least memory, and its parts.

    Args:
        host_bytes: bytes that one rank may take of its host; None where unknown.
    """
    memory = smallest.memory
    host = ""
    if smallest.host_bytes and host_bytes is not None:
        host = (
            f"; on the host its states would need {format_bytes(smallest.host_bytes)} a rank, "
            f"and {format_bytes(host_bytes)} are there"
        )
    return InfeasiblePlanError(
        f"memory binds: the smallest layout ({name_layout(smallest.layout)}, "
        f"{name_setting(smallest.setting)}) needs {format_bytes(memory.total_bytes)} per device "
        f"({name_memory(memory)}), {format_bytes(memory.total_bytes - limit_bytes)} more than the "
        f"limit of {format_bytes(limit_bytes)}{host}",
        hint,
    )


MOST_DOUBLINGS = 8
COPIES = "copies to the host were not measured: run `moetune profile`"


def what_would_fit(search: LayoutSearch, *, inputs: PlanInputs) -> str:
    """Return the smallest change that makes a layout fit: of a pin, else of the ranks."""
    pins, costs = search.pins, search.prices.costs
    if pins.offload is False and _smallest(
        replace(search, pins=replace(pins, offload=None)), inputs
    ):
        return "let model states live on the host: omit --no-offload"
    if pins.zero is False and _smallest(replace(search, pins=replace(pins, zero=None)), inputs):
        return "shard the model states: --zero 1"
    found = _smallest(replace(search, pins=LayoutPins()), inputs)
    if pins != LayoutPins() and found is not None:
        axes = " ".join(f"--{axis} {getattr(found, axis)}" for axis in AXES)
        return f"nearest: {axes} --expert-parallel {found.expert_parallel}"
    for doubling in range(1, MOST_DOUBLINGS + 1):
        ranks = inputs.world_size * 2**doubling
        if _smallest(search, replace(inputs, world_size=ranks)) is not None:
            copies = "" if can_offload(costs) else f"; {COPIES}"
            return f"nearest: {ranks} ranks instead of {inputs.world_size}, or more memory{copies}"
    return "no number of ranks fits: allow more memory, or take a shorter --seq"


def _smallest(search: LayoutSearch, inputs: PlanInputs) -> Layout | None:
    """Return the layout with the least memory; None where not even that fits."""
    model = search.prices.model
    try:
        batch = whole_batch(
            model=model, tokens_per_rank=inputs.tokens_per_rank, world_size=inputs.world_size
        )
        layouts = find_layouts(
            model=model, world_size=inputs.world_size, batch=batch, pins=search.pins
        )
    except InputError:
        return None
    trials = (replace(search, batch=batch).trial(layout) for layout in layouts)
    best = min((trial.smallest() for trial in trials), key=lambda one: one.memory.total_bytes)
    return best.layout if best.memory.total_bytes <= search.limit_bytes else None
