"""Shards of single parameters, and torch's optimizers over them, for `ChunkedOptimizer`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from moetune.domain.errors import InputError
from moetune.runtime.sharded.stored import StoredChunk

_KINDS = (Adam, AdamW, SGD)


def over_shards(optimizer: Optimizer, values: list[list[nn.Parameter]]) -> Optimizer:
    """Return an optimizer of the same class and settings over other parameters.

    Args:
        values: of each of the optimizer's groups.
    """
    groups: list[dict[str, Any]] = [
        {**_settings(group), "params": members}
        for group, members in zip(optimizer.param_groups, values, strict=True)
    ]
    return _KINDS[_KINDS.index(type(optimizer))](groups)


def check_optimizer(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Check that an optimizer can step shards of this model.

    Raises:
        InputError: it is of an unknown class or for another model, or has stepped before, or the
            model has no parameters.
    """
    if not parameters:
        raise InputError("the model has no parameters")
    if type(optimizer) not in _KINDS:
        known = ", ".join(kind.__name__ for kind in _KINDS)
        raise InputError(
            f"{type(optimizer).__name__} cannot step shards of parameters", f"use one of {known}"
        )
    if optimizer.state:
        raise InputError(
            f"the optimizer has states of {len(optimizer.state)} parameters already",
            "shard the model before the first step",
        )
    known_ids = {id(parameter) for parameter in parameters.values()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known_ids:
                raise InputError(
                    f"parameter {place} of the optimizer's group {number}, of shape "
                    f"{tuple(parameter.shape)}, is not one of the model's {len(known_ids)}",
                    "build the optimizer on model.parameters()",
                )


def state_copies(optimizer: Optimizer) -> int:
    """Return the number of state tensors that the optimizer has for every parameter."""
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2 + any(group["amsgrad"] for group in optimizer.param_groups)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings, with torch's fused kernel if the caller did not choose one."""
    settings = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
    if settings.get("fused") is None and not settings.get("foreach"):
        settings["fused"] = not (settings.get("capturable") or settings.get("differentiable"))
    return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShard:
    """A parameter's elements on this rank: a view of its chunk's master.

    The optimizer has a parameter for each, not one for the chunk, so that those without a gradient
    are skipped as in torch.

    Args:
        low, high: range in the chunk's master.
        first: index in the parameter of the element at `low`.
    """

    name: str
    chunk: StoredChunk
    values: nn.Parameter
    low: int
    high: int
    first: int


def parameter_shards(
    chunks: Iterable[StoredChunk], *, only_trainable: bool = True
) -> tuple[ParameterShard, ...]:
    """Return this rank's shards of parameters."""
    return tuple(
        ParameterShard(
            name=slot.name, chunk=chunk, low=low - chunk.low, high=high - chunk.low,
            values=nn.Parameter(
                chunk.master[low - chunk.low : high - chunk.low],
                requires_grad=chunk.chunk.group.is_trainable,
            ),
            first=low - slot.offset,
        )
        for chunk in chunks
        if chunk.chunk.group.is_trainable or not only_trainable
        for slot in chunk.chunk.slots
        for low, high in (chunk.own_range(slot),)
        if low < high
    )  # fmt: skip


def first_states(optimizer: Optimizer, shard: ParameterShard) -> dict[str, torch.Tensor]:
    """Return a shard's optimizer states, which are made as zeros before the first step."""
    state: dict[str, Any] = optimizer.state[shard.values]
    group = next(
        (
            group
            for group in optimizer.param_groups
            if any(each is shard.values for each in group["params"])
        ),
        None,
    )
    if not state and group is not None:
        keys = ["exp_avg", "exp_avg_sq"] if "betas" in group else ["momentum_buffer"]
        if "betas" in group:
            # As torch: with the values only if a kernel reads it, else it would be read back from
            # a GPU for every parameter and step.
            is_read_by_kernels = group.get("fused") or group.get("capturable")
            device = shard.values.device if is_read_by_kernels else torch.device("cpu")
            state["step"] = torch.zeros((), device=device)
        elif not group["momentum"]:
            keys = []
        if group.get("amsgrad"):
            keys.append("max_exp_avg_sq")
        state.update({key: torch.zeros_like(shard.values.detach()) for key in keys})
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
