"""Which optimizers can step shards, and what each keeps for a parameter."""

from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from moetune.domain.errors import InputError

_KINDS = (Adam, AdamW, SGD)


def over_shards(optimizer: Optimizer, values: list[list[nn.Parameter]]) -> Optimizer:
    """Return an optimizer of the same kind, with the same settings, over these values.

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
        InputError: it is of another kind or another model, or has stepped before, or the model
            has no parameters.
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
    """Return how many values the optimizer keeps for every parameter."""
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2 + any(group["amsgrad"] for group in optimizer.param_groups)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's settings: fused where the caller leaves the choice."""
    settings = {key: value for key, value in group.items() if key not in {"params", "param_names"}}
    if settings.get("fused") is None and not settings.get("foreach"):
        settings["fused"] = not (settings.get("capturable") or settings.get("differentiable"))
    return settings
