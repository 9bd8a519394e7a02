"""What of a model needs its chunks at the same time, and who has replicas of its parameters."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from moetune.runtime.expert_layer import ExpertLayer
from moetune.runtime.layer import MoELayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module whose forward reads these parameters.

    Args:
        name: of the module in the model.
        parameters: names of its own ones; all below it where it uses them itself.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model: modules with parameters of their own.

    Layers of experts and `nn.MultiheadAttention` use their children's parameters without
    calling the children, and are one unit with everything below them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(_units(model, "", names, set()))


def expert_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return the layer of every parameter of which each expert-parallel rank has its own."""
    owners: dict[int, MoELayer] = {
        id(parameter): module
        for module in model.modules()
        if isinstance(module, MoELayer) and module.link.num_ranks > 1
        for parameter in module.experts.parameters()
    }
    return {
        name: owners[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in owners
    }


def _units(module: nn.Module, name: str, names: dict[int, str], seen: set[int]) -> Iterator[Unit]:
    if id(module) in seen:
        return
    seen.add(id(module))
    is_whole = isinstance(module, ExpertLayer | nn.MultiheadAttention)
    own = tuple(dict.fromkeys(names[id(each)] for each in module.parameters(recurse=is_whole)))
    if own:
        yield Unit(name=name or type(module).__name__, module=module, parameters=own)
    if is_whole:
        return
    for child_name, child in module.named_children():
        yield from _units(child, f"{name}.{child_name}".strip("."), names, seen)
