"""A resumed job's line on its ranks, experts and plans."""

from torch import nn

from moetune.comm.gloo import shared_communicator
from moetune.runtime.elastic.checkpoints import Checkpoint
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.plans.book import PlanBook

_MOST_SHOWN = 8


def resumed_on(checkpoint: Checkpoint, model: nn.Module, book: PlanBook | None = None) -> str:
    """Return where a job goes on, which experts the ranks of its first layer have, and its plans.

    Args:
        checkpoint: that was loaded.
        book: of the model's layers.
    """
    layers = [module for module in model.modules() if isinstance(module, PlannedLayer)]
    num_ranks = shared_communicator().num_ranks
    parts = [*(_experts(checkpoint, layer, num_ranks) for layer in layers[:1])]
    parts.append(_plans(layers, book))
    before = f"{checkpoint.num_ranks} rank{'' if checkpoint.num_ranks == 1 else 's'}"
    return f"resumed step {checkpoint.step} of {before} on {num_ranks}: {', '.join(parts)}"


def _experts(checkpoint: Checkpoint, layer: PlannedLayer, num_ranks: int) -> str:
    placement = layer.experts.placement
    each = placement.num_local
    change = str(each)
    before, rest = divmod(placement.num_experts, checkpoint.num_ranks)
    if placement.num_ranks == num_ranks and not rest and before != each:
        change = f"{before} -> {each}"
    if placement.order:
        return f"experts {change} a rank (as the plan places them)"
    firsts = range(0, placement.num_experts, each)
    where = [str(one) if each == 1 else f"{one}–{one + each - 1}" for one in firsts[:_MOST_SHOWN]]
    return (
        f"experts {change} a rank ({', '.join(where)}{', …' if len(firsts) > len(where) else ''})"
    )


def _plans(layers: list[PlannedLayer], book: PlanBook | None) -> str:
    wanted = {(layer.shape, layer.communicator.num_ranks) for layer in layers}
    keys = [(one, one.workload.key) for one in (() if book is None else book.plans)]
    found = [one for one, key in keys if (key.layer, key.num_ranks) in wanted]
    if not found:
        return "no plan: one chunk"
    return ", ".join(f"plan {one.id[:6]} for {one.inputs.world_size} ranks" for one in found)
