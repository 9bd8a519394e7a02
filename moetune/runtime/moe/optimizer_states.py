"""Optimizer states of experts: in a state dict they are DTensors of all experts, as parameters are.

An optimizer knows nothing of layers, nor a layer of optimizers. A hook on the steps of all
optimizers detects those with experts' parameters, and adds hooks to their state dicts.
`torch.distributed.checkpoint.state_dict` takes a step of zeros before it reads states.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moetune.comm.agree import largest
from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.runtime.moe.placement import ExpertPlacement, is_dtensor
from moetune.runtime.moe.total_norm import Spread, sum_norms_over_ranks

_ZERO = "ZeroRedundancyOptimizer"


_Convert = Callable[[ExpertPlacement, nn.Parameter, str, torch.Tensor], torch.Tensor]


def watch_optimizers(experts: nn.Module, placement: ExpertPlacement) -> None:
    """Convert the states that any optimizer will have for a module's parameters."""
    _watch().placements[experts] = placement


def spread_parameters() -> Spread:
    """Return the living parameters of experts that are spread over ranks, with their groups."""
    return [
        (parameter, placement.group)
        for parameter, placement in _watch().parameters()
        if placement.group is not None
    ]


@functools.cache
def _watch() -> "_OptimizerWatch":
    """Return the watch of this process; the first layer registers its hook."""
    watch = _OptimizerWatch()
    register_optimizer_step_pre_hook(watch.before_step)
    _agree_on_overflow(watch.ranks_of)
    sum_norms_over_ranks(spread_parameters)
    return watch


class _OptimizerWatch:
    """Hooks on the optimizers of experts.

    Attributes:
        placements: placements of the modules with experts, while the modules live.
    """

    def __init__(self) -> None:
        self.placements: weakref.WeakKeyDictionary[nn.Module, ExpertPlacement] = (
            weakref.WeakKeyDictionary()
        )
        self._num_groups: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(self, optimizer: Optimizer, _: object, __: object) -> None:
        """Hook an optimizer at its first step, and convert the states that it already has."""
        if self._num_groups.get(optimizer) == len(optimizer.param_groups):
            return
        self._num_groups[optimizer] = len(optimizer.param_groups)
        owners = self._owners()
        mine = [parameter for parameter in _parameters(optimizer) if id(parameter) in owners]
        if not mine or optimizer in self._hooked:
            return
        if type(optimizer).__name__ == _ZERO:
            raise InputError(
                f"{_ZERO} broadcasts each parameter from the rank that steps it, and experts "
                "differ between ranks",
                "give it the other parameters alone, or shard the model with moetune.shard",
            )
        self._hooked.add(optimizer)
        optimizer.register_state_dict_post_hook(self._distribute)
        optimizer.register_load_state_dict_pre_hook(self._take_parts)
        for parameter in mine:
            states = optimizer.state.get(parameter, {})
            states.update(_converted(states, owners[id(parameter)], parameter, _loaded_part))

    def parameters(self) -> Iterator[tuple[nn.Parameter, ExpertPlacement]]:
        """Yield the living parameters of experts with their placements."""
        for experts, placement in self.placements.items():
            for parameter in experts.parameters(recurse=False):
                yield parameter, placement

    def ranks_of(self, optimizer: Optimizer) -> list[Communicator]:
        """Return communicators of the ranks that share the optimizer's experts, each group once."""
        mine = {id(parameter) for parameter in _parameters(optimizer)}
        groups = [owner.group for parameter, owner in self.parameters() if id(parameter) in mine]
        return [communicator_of(group) for group in dict.fromkeys(groups) if group is not None]

    def _distribute(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        ids = range(len(_parameters(optimizer)))
        return self._convert(optimizer, state, ids, _distributed)

    def _take_parts(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        ids = chain.from_iterable(group["params"] for group in state["param_groups"])
        return self._convert(optimizer, state, ids, _local_part)

    def _convert(
        self, optimizer: Optimizer, state: dict[str, Any], ids: Iterable[object], convert: _Convert
    ) -> dict[str, Any]:
        """Return a state dict with converted states of experts; `ids` are its parameters' ids."""
        owners, states = self._owners(), dict(state["state"])
        for key, parameter in zip(ids, _parameters(optimizer), strict=False):
            if key in states and id(parameter) in owners:
                states[key] = _converted(states[key], owners[id(parameter)], parameter, convert)
        return state | {"state": states}

    def _owners(self) -> dict[int, ExpertPlacement]:
        """Return the placements of plain parameters, whose states must be converted to save them.

        Parameters that are DTensors already have states that are DTensors.
        """
        return {
            id(parameter): placement
            for parameter, placement in self.parameters()
            if not is_dtensor(parameter)
        }


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _converted(
    states: dict[str, Any], owner: ExpertPlacement, parameter: nn.Parameter, convert: _Convert
) -> dict[str, Any]:
    """Return a parameter's states with converted tensors; numbers stay."""
    return {
        key: convert(owner, parameter, key, value)
        if isinstance(value, torch.Tensor) and value.dim()
        else value
        for key, value in states.items()
    }


def _distributed(
    owner: ExpertPlacement, parameter: nn.Parameter, key: str, value: torch.Tensor
) -> torch.Tensor:
    """Return a state as a DTensor; raise InputError if it lacks a row for each expert."""
    if value.dim() != parameter.dim() or len(value) != len(parameter):
        raise InputError(
            f"the optimizer's {key} {tuple(value.shape)} of experts {tuple(parameter.shape)} is "
            "not one row for each expert, so that no state dict of all ranks can have it",
            "use an optimizer with states of the parameters' shape, such as AdamW",
        )
    return owner.distribute(value, "optimizer")


def _local_part(
    owner: ExpertPlacement, _: nn.Parameter, key: str, value: torch.Tensor
) -> torch.Tensor:
    what = f"the optimizer's {key} of experts"
    part = owner.part_of(value, what, "optimizer")
    # A slice would keep the memory of all experts: torch takes loaded states without a copy.
    return part if is_dtensor(value) else part.clone()


def _loaded_part(
    owner: ExpertPlacement, parameter: nn.Parameter, key: str, value: torch.Tensor
) -> torch.Tensor:
    """Return this rank's part of a state that existed before the first step."""
    if not is_dtensor(value) and len(value) == len(parameter):
        return value
    return _local_part(owner, parameter, key, value)


def _agree_on_overflow(ranks_of: Callable[[Optimizer], Iterable[Communicator]]) -> None:
    """Make every GradScaler of this process agree on overflow over the ranks, from now on.

    torch's GradScaler checks only this rank's gradients. If a single rank's experts overflowed,
    that rank alone would skip its step. torch's ShardedGradScaler agrees over the ranks of FSDP.
    Libraries that make a plain GradScaler call the same method.

    Args:
        ranks_of: returns the communicators that share an optimizer's experts, in the same order on
            all ranks; none for optimizers without spread experts.
    """
    find = GradScaler._unscale_grads_

    @functools.wraps(find)
    def agreed(
        self: GradScaler,
        optimizer: Optimizer,
        *args: Any,  # noqa: ANN401 - as torch passes them
    ) -> dict[torch.device, torch.Tensor]:
        flags = find(self, optimizer, *args)
        for communicator in ranks_of(optimizer):
            _agree_on_flags(communicator, flags)
        return flags

    GradScaler._unscale_grads_ = agreed  # type: ignore[assignment,method-assign]


def _agree_on_flags(communicator: Communicator, flags: dict[torch.device, torch.Tensor]) -> None:
    """Replace the overflow flags with their maximum over the ranks.

    Args:
        flags: 0 or 1 by device; empty on a rank without gradients.
    """
    mine = max((float(flag) for flag in flags.values()), default=0.0)
    (agreed,) = largest(communicator, (mine,), "the agreement on overflow")
    for flag in flags.values():
        flag.fill_(agreed)
    if not flags:
        flags[communicator.device] = torch.tensor([agreed], device=communicator.device)
