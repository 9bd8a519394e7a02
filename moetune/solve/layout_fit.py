"""What would fit where no layout does: fewer pins, or more ranks."""

from dataclasses import replace

from moetune.domain.errors import InputError
from moetune.domain.plan_inputs import Layout, PlanInputs
from moetune.solve.layout_chunks import can_offload
from moetune.solve.layout_space import LayoutPins, find_layouts, whole_batch
from moetune.solve.layout_trial import Search

MOST_DOUBLINGS = 8
COPIES = "states on the host have no price, the profile has no copies: run `moetune profile`"


def what_would_fit(search: Search, *, inputs: PlanInputs) -> str:
    """Return the change that leaves the most as it is: a pin, then the number of ranks."""
    pins, costs = search.pins, search.prices.costs
    if pins.offload is False and _smallest(
        replace(search, pins=replace(pins, offload=None)), inputs
    ):
        return "let model states live on the host: leave --no-offload away"
    if pins.zero is False and _smallest(replace(search, pins=replace(pins, zero=None)), inputs):
        return "shard the model states: --zero"
    found = _smallest(replace(search, pins=LayoutPins()), inputs)
    if pins != LayoutPins() and found is not None:
        axes = " ".join(f"--{axis} {getattr(found, axis)}" for axis in ("dp", "ep", "tp", "pp"))
        return f"nearest: {axes} --expert-parallel {found.expert_parallel}"
    for doubling in range(1, MOST_DOUBLINGS + 1):
        ranks = inputs.world_size * 2**doubling
        if _smallest(search, replace(inputs, world_size=ranks)) is not None:
            copies = "" if can_offload(costs) else f"; {COPIES}"
            return f"nearest: {ranks} ranks instead of {inputs.world_size}, or more memory{copies}"
    return "no number of ranks fits: allow more memory, or take a shorter --seq"


def _smallest(search: Search, inputs: PlanInputs) -> Layout | None:
    """Return the layout with the least memory, None where it does not fit either."""
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
