"""Options of `moetune.shard` from a plan, and the checks that the plan is for this model."""

import os
from pathlib import Path

from torch import nn

from moetune.domain.any_plan import AnyPlan, plan_from_json
from moetune.domain.errors import InputError
from moetune.domain.model_plan import Chunks
from moetune.domain.training_document import TrainingDocument
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.sharded.options import ShardOptions

_MAX_RATIO = 1.5
"""Ratio of parameters from which a model is another one: heads may share the embedding's."""
_ELSE = "plan this model with `moetune plan --output`, or give chunk_bytes instead of a plan"


def planned_options(
    plan: object, model: nn.Module, num_ranks: int, *, given: ShardOptions
) -> ShardOptions:
    """Return a plan's chunks as options.

    Args:
        plan: of a training, as `moetune.plan` returns it, or the path of a plan file.
        num_ranks: of the data-parallel group.
        given: what the caller gave with the plan, of which only `pin` may differ from the default.

    Raises:
        InputError: there is no plan, the plan has no chunks or is for another model or number of
            ranks, or there are other options, too.
    """
    found = _plan_of(plan)
    name = f"plan {found.id[:6]}"
    if given != ShardOptions(pin=given.pin):
        raise InputError(
            f"{name} and other options of chunks are given",
            "omit chunk_bytes, cache_bytes, scatter and offload, or the plan",
        )
    if found.chunks is None:
        raise InputError(
            f"{name} has no chunks: its states are not sharded over single ranks",
            "plan with --target moetune --zero 3 --tp 1 --cp 1 --pp 1, or give chunk_bytes",
        )
    _check_ranks(found, model, num_ranks, name)
    _check_size(found.chunks, model, name)
    return ShardOptions(
        chunk_bytes=found.chunks.chunk_bytes, cache_bytes=found.chunks.cache_bytes,
        scatter=found.chunks.scatter, offload=found.chunks.offload, pin=given.pin, plan=found.id,
    )  # fmt: skip


def _plan_of(plan: object) -> TrainingDocument:
    """Return a training's plan: of a view, of itself, or of its file."""
    found = getattr(plan, "plan", plan)
    if isinstance(found, str | os.PathLike):
        found = _read(Path(found))
    if not hasattr(found, "as_model"):
        raise InputError(
            f"{plan!r} is neither the plan of a training nor a path",
            "make one with moetune.plan, or give the path of a plan file",
        )
    model: TrainingDocument = found.as_model()
    return model


def _read(path: Path) -> AnyPlan:
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a plan", "name one of its files")
    try:
        return plan_from_json(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"plan {path} cannot be read: {error.strerror}") from None


def _check_ranks(plan: TrainingDocument, model: nn.Module, num_ranks: int, name: str) -> None:
    """Raise InputError unless states and experts are spread over as many ranks as the plan's."""
    layout = plan.layout
    if layout.dp != num_ranks:
        raise InputError(
            f"{name} shards over {layout.dp} ranks, the data-parallel group has {num_ranks}",
            _ELSE,
        )
    for module in model.modules():
        if isinstance(module, PlannedLayer) and module.communicator.num_ranks != layout.ep:
            raise InputError(
                f"{name} is for experts on {layout.ep} ranks, this model has them on "
                f"{module.communicator.num_ranks}",
                _ELSE,
            )


def _check_size(chunks: Chunks, model: nn.Module, name: str) -> None:
    """Raise InputError where the model has far more or fewer parameters than the plan's."""
    spread = {
        id(parameter): module.communicator.num_ranks
        for module in model.modules()
        if isinstance(module, PlannedLayer)
        for parameter in module.experts.parameters()
    }
    found = sum(one.numel() * spread.get(id(one), 1) for one in model.parameters())
    if not 1 / _MAX_RATIO < found / chunks.num_parameters < _MAX_RATIO:
        raise InputError(
            f"{name} is for a model of {chunks.num_parameters:,} parameters, this one has "
            f"{found:,}",
            _ELSE,
        )
