"""Options of `moetune.shard` from a plan, and the checks that the plan is for this model."""

import os
from collections.abc import Iterator

from torch import nn

from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.plans.shared import plans_of
from moetune.runtime.sharded.options import ShardOptions

_MAX_RATIO = 1.5
"""Ratio of parameters from which a model is another one: heads may share the embedding's."""


def planned_options(
    plan: Plan | str | os.PathLike[str], model: nn.Module, num_ranks: int, *, given: ShardOptions
) -> ShardOptions:
    """Return a plan's chunks as options.

    Args:
        plan: a plan, or the path of a plan file.
        num_ranks: of the data-parallel group.
        given: what the caller gave with the plan, of which only `pin` may differ from the default.

    Raises:
        InputError: the file holds no plan, the plan has no chunks or is for another model or
            number of ranks, or there are other options, too.
    """
    plans = plans_of(plan)
    if len(plans) != 1:
        raise InputError(f"{plan} is a folder, not a plan", "name one of its files")
    name = f"plan {plans[0].id[:6]}"
    if given != ShardOptions(pin=given.pin):
        raise InputError(
            f"{name} and other options of chunks are given",
            "omit chunk_bytes, cache_bytes, scatter and offload, or the plan",
        )
    for problem in _problems(plans[0], model, num_ranks):
        raise InputError(
            f"{name} {problem}",
            "plan this model with `moetune plan --output`, or give chunk_bytes instead of a plan",
        )
    chosen = plans[0].chunks
    assert chosen is not None  # noqa: S101 - else that was a problem
    return ShardOptions(
        chunk_bytes=chosen.chunk_bytes, cache_bytes=chosen.cache_bytes, scatter=chosen.scatter,
        offload=chosen.offload, pin=given.pin, plan=plans[0].id,
    )  # fmt: skip


def _problems(plan: Plan, model: nn.Module, num_ranks: int) -> Iterator[str]:
    """Yield why the plan is not for this model on these ranks."""
    whole, wanted = plan.inputs.request.whole, plan.workload.key
    if plan.chunks is None or whole is None:
        kind = "one layer" if plan.transformer is None else "a model whose states are kept whole"
        yield f"has no chunks: it is for {kind}"
        return
    if plan.layout.dp != num_ranks:
        yield f"shards over {plan.layout.dp} ranks, the data-parallel group has {num_ranks}"
    layers = [module for module in model.modules() if isinstance(module, PlannedLayer)]
    if len(layers) != whole.num_moe_layers:
        yield (
            f"is for a model with {whole.num_moe_layers} layers of experts, this one has "
            f"{len(layers)}"
        )
    for layer in layers:
        shape, ranks = layer.shape, layer.communicator.num_ranks
        if (shape, ranks) != (wanted.layer, wanted.num_ranks):
            yield (
                f"is for a model with {wanted.layer} on {wanted.num_ranks} ranks, this one has "
                f"{shape} on {ranks}"
            )
    spread = {
        id(parameter): layer.communicator.num_ranks
        for layer in layers
        for parameter in layer.experts.parameters()
    }
    size = sum(each.numel() * spread.get(id(each), 1) for each in model.parameters())
    if not 1 / _MAX_RATIO < size / whole.num_parameters < _MAX_RATIO:
        yield f"is for a model of {whole.num_parameters:,} parameters, this one has {size:,}"
