"""Options of `moetune.shard` from a plan, and the checks that the plan is for this model."""

import os

from torch import nn

from moetune.domain.errors import InputError
from moetune.domain.model_plan import Chunks
from moetune.domain.plan import Plan
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.plans.shared import plans_of
from moetune.runtime.sharded.options import ShardOptions
from moetune.runtime.sharded.replicas import ReplicaGroup

_MOST_APART = 1.5
"""Ratio of parameters from which a model is another one: heads may share the embedding's."""
_ELSE = "plan this model with `moetune plan --output`, or give chunk_bytes instead of a plan"


def planned_options(
    plan: Plan | str | os.PathLike[str],
    model: nn.Module,
    replicas: ReplicaGroup,
    *,
    own: ShardOptions,
) -> ShardOptions:
    """Return a plan's chunks as options.

    Args:
        plan: a plan, or the path of a plan file.
        own: what the caller gave beside the plan, of which only `pin` may differ from the default.

    Raises:
        InputError: the file holds no plan, the plan has no chunks or is for another model or
            number of ranks, or there are other options, too.
    """
    found, *others = plans_of(plan) or (None,)
    if found is None or others:
        raise InputError(f"{plan} is a folder, not a plan", "name one of its files")
    name = f"plan {found.id[:6]}"
    if own != ShardOptions(pin=own.pin):
        raise InputError(
            f"{name} and other options of chunks are given",
            "omit chunk_bytes, cache_bytes, scatter and offload, or the plan",
        )
    chosen = _chunks_of(found, name)
    _check_ranks(found, replicas, name)
    _check_experts(found, model, name)
    _check_size(found, model, name)
    return ShardOptions(
        chunk_bytes=chosen.chunk_bytes, cache_bytes=chosen.cache_bytes, scatter=chosen.scatter,
        offload=chosen.offload, pin=own.pin, plan=found.id,
    )  # fmt: skip


def _chunks_of(plan: Plan, name: str) -> Chunks:
    """Return the plan's chunks; InputError where it has none."""
    if plan.chunks is None:
        kind = "one layer" if plan.transformer is None else "a model whose states are kept whole"
        raise InputError(f"{name} has no chunks: it is for {kind}", _ELSE)
    return plan.chunks


def _check_ranks(plan: Plan, replicas: ReplicaGroup, name: str) -> None:
    """Raise InputError unless the group has as many ranks as the plan's states are spread over."""
    if plan.layout.dp != replicas.num_ranks:
        raise InputError(
            f"{name} shards over {plan.layout.dp} ranks, the data-parallel group has "
            f"{replicas.num_ranks}",
            _ELSE,
        )


def _check_experts(plan: Plan, model: nn.Module, name: str) -> None:
    """Raise InputError unless the model has the plan's layers of experts, and as many."""
    whole, wanted = plan.inputs.request.whole, plan.workload.key
    layers = [module for module in model.modules() if isinstance(module, PlannedLayer)]
    number = whole.num_moe_layers if whole is not None else 0
    if len(layers) != number:
        raise InputError(
            f"{name} is for a model with {number} layers of experts, this one has {len(layers)}",
            _ELSE,
        )
    for layer in layers:
        found = layer.shape, layer.communicator.num_ranks
        if found != (wanted.layer, wanted.num_ranks):
            raise InputError(
                f"{name} is for a model with {wanted.layer} on {wanted.num_ranks} ranks, this "
                f"one has {found[0]} on {found[1]}",
                _ELSE,
            )


def _check_size(plan: Plan, model: nn.Module, name: str) -> None:
    """Raise InputError where the model has far more or fewer parameters than the plan's."""
    whole = plan.inputs.request.whole
    assert whole is not None  # noqa: S101 - only whole models have chunks
    spread = {
        id(parameter): module.communicator.num_ranks
        for module in model.modules()
        if isinstance(module, PlannedLayer)
        for parameter in module.experts.parameters()
    }
    found = sum(one.numel() * spread.get(id(one), 1) for one in model.parameters())
    if not 1 / _MOST_APART < found / whole.num_parameters < _MOST_APART:
        raise InputError(
            f"{name} is for a model of {whole.num_parameters:,} parameters, this one has {found:,}",
            _ELSE,
        )
