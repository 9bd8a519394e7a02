"""Refuse data-parallel wrappers that take the experts of different ranks for replicas.

They would silently average, gather or broadcast tensors that only share a name. They are
DistributedDataParallel without `prepare_ddp`, `fully_shard` without `prepare_fsdp`, and FSDP1.
"""

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from moetune.domain.errors import InputError
from moetune.runtime.moe.optimizer_states import watch_optimizers
from moetune.runtime.moe.placement import ExpertPlacement, is_dtensor

_PREPARE = "call moetune.prepare_fsdp(model, mesh) first, and fully_shard the model then"


class SpreadExperts(nn.Module):
    """A module with this rank's experts as parameters; it refuses to mix them with other ranks'.

    Copies and pickles have experts of the same ranks.

    Attributes:
        placement: placement of the experts.
        is_replicated: data-parallel wrappers average the gradients, as they do for replicas.
    """

    placement: ExpertPlacement
    is_replicated = False

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - as nn.Module
        """Set an attribute, and check DTensors, which `fully_shard` sets in this way."""
        if is_dtensor(value):
            check_dtensor(self.placement, f"experts.{name}", value)
        super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copied or pickled module's state, and restore the tags that copies lose."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.placement.num_ranks > 1:
            watch_optimizers(self, self.placement)
            self.tag()

    def tag(self) -> None:
        """Tag the parameters that only this rank has, for data-parallel wrappers."""
        for parameter in self.parameters(recurse=False):
            parameter.allreduce = self.is_replicated  # type: ignore[attr-defined] # wrappers read it


def guard(module: nn.Module, placement: ExpertPlacement) -> None:
    """Make a library's module a `SpreadExperts`, too, under the name of its class."""
    kind: Any = type(module)
    module.__class__ = _guarded(kind)
    module.placement = placement  # type: ignore[assignment] # torch types it as a module


@functools.cache
def _guarded(kind: Any) -> type[nn.Module]:  # noqa: ANN401 - a class of modules, for the cache's types
    """Return a subclass with checks, made as `fully_shard` makes its classes."""

    def reduce(self: nn.Module, _: object) -> tuple[Any, ...]:
        return _new, (kind,), self.__dict__.copy()

    return type(kind.__name__, (SpreadExperts, kind), {
        "__reduce_ex__": reduce, "__module__": kind.__module__,
        "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
    })  # fmt: skip


def _new(kind: Any) -> nn.Module:  # noqa: ANN401 - as above
    return _guarded(kind).__new__(_guarded(kind))


def check_plain(module: nn.Module, names: Iterable[str]) -> None:
    """Raise InputError if a parametrization, such as PEFT's LoRA, computes a rank's experts.

    Its parameters would be averaged over ranks, and saved for a single rank's experts.
    """
    for name in names:
        if name not in module._parameters and not _is_flattened(module):  # noqa: SLF001 - as above
            raise InputError(
                f"{type(module).__name__}.{name} is computed from other parameters, as by LoRA, "
                "for the experts of one rank alone",
                'adapt the attention\'s modules alone, as LoraConfig(target_modules=["q_proj", '
                '"v_proj"]), or train on one rank',
            )


def _is_flattened(module: nn.Module) -> bool:
    """Return whether FSDP1 has taken a module's parameters, which `WrapperCheck` refuses."""
    is_managed: bool = getattr(module, "_is_fsdp_managed_module", False)
    return is_managed and not parametrize.is_parametrized(module)


class WrapperCheck:
    """The search for wrappers around a module of experts; each wrapper is checked once.

    Args:
        placement: placement of the experts over several ranks.
    """

    def __init__(self, placement: ExpertPlacement) -> None:
        self._placement = placement
        self._passed: weakref.ref[DistributedDataParallel] | None = None

    def __reduce__(self) -> tuple[type["WrapperCheck"], tuple[ExpertPlacement]]:
        """Return a fresh object: copies check their wrappers again."""
        return WrapperCheck, (self._placement,)

    def run(self, experts: nn.Module, parameter: torch.Tensor) -> None:
        """Raise InputError if the running wrapper averages experts of different ranks.

        Args:
            parameter: a parameter of the experts.
        """
        self._check_ddp(parameter)
        is_managed = getattr(experts, "_is_fsdp_managed_module", False)
        is_parameter = isinstance(parameter, nn.Parameter)
        is_flat = not is_parameter or getattr(parameter, "_fsdp_flattened", False)
        if is_managed and not is_dtensor(parameter) and is_flat:
            raise InputError(
                "FullyShardedDataParallel shards experts that differ between ranks as if they were "
                "replicas",
                "use torch.distributed.fsdp.fully_shard after moetune.prepare_fsdp(model, mesh)",
            )

    def _check_ddp(self, parameter: torch.Tensor) -> None:
        wrapper = DistributedDataParallel._active_ddp_module  # noqa: SLF001 - as torch.compile does
        if wrapper is None or (self._passed is not None and self._passed() is wrapper):
            return
        averaged = set(dist.get_process_group_ranks(wrapper.process_group))
        is_managed = any(tensor is parameter for tensor in wrapper._module_parameters)  # noqa: SLF001
        if is_managed and len(averaged & set(self._placement.members)) > 1:
            raise InputError(
                f"DistributedDataParallel over ranks {sorted(averaged)} averages experts that "
                f"differ between ranks {list(self._placement.members)}, and has overwritten them "
                "with those of its first rank",
                "build the model anew and wrap it as DistributedDataParallel("
                "moetune.prepare_ddp(model)); ranks of one TensorExpertLayer share no wrapper",
            )
        self._passed = weakref.ref(wrapper)


def check_dtensor(placement: ExpertPlacement, name: str, value: torch.Tensor) -> None:
    """Raise InputError unless a DTensor has all ranks' experts in the natural order."""
    if not is_dtensor(value):
        return
    placement.check_natural(f"experts.{name} as a DTensor")
    if len(value) != placement.num_experts:
        ranks = sorted(value.device_mesh.mesh.flatten().tolist())
        raise InputError(
            f"{name} would be a DTensor of {len(value)} experts over ranks {ranks}, but "
            f"each of the ranks {list(placement.members)} has others of the layer's "
            f"{placement.num_experts}",
            _PREPARE,
        )
