"""Modules that read parameters, and the chunks of modules that FSDP2 gathers together."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moetune.runtime.moe.planned_layer import PlannedLayer

_WHOLE = PlannedLayer, nn.MultiheadAttention
"""Modules that read their descendants' parameters without calling the descendants."""
_LISTS = nn.ParameterList, nn.ParameterDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module that reads parameters directly, not only through its children.

    Args:
        name: name of the module in the model.
        parameters: the parameters by their names in the model.
    """

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The parameters' dtypes."""
        return frozenset(parameter.dtype for parameter in self.parameters.values())

    @property
    def num_bytes(self) -> int:
        """The size of the parameters in bytes."""
        return sum(parameter.nbytes for parameter in self.parameters.values())


def find_units(model: nn.Module, ignored: Collection[nn.Parameter]) -> tuple[Unit, ...]:
    """Return a model's units, in the order in which the model registers them.

    An expert layer, or torch's attention, is a unit with everything in it. Parameters of the model
    itself, and parameters that several modules read, are in no unit.

    Args:
        ignored: parameters that belong to no chunk.
    """
    reads = {module: tuple(_read_by(module)) for module in _modules(model, set())}
    readers = Counter(id(value) for parameters in reads.values() for value in set(parameters))
    outside = {id(value) for value in (*ignored, *reads[model])}
    mine = {
        id(value): name
        for name, value in model.named_parameters()
        if id(value) not in outside and readers[id(value)] == 1
    }
    names = {module: name for name, module in model.named_modules()}
    units = (
        Unit(
            name=names[module], module=module,
            parameters={mine[id(value)]: value for value in parameters if id(value) in mine},
        )
        for module, parameters in reads.items()
    )  # fmt: skip
    return tuple(unit for unit in units if unit.parameters)


def _modules(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules that may read parameters, each once."""
    if module in seen or isinstance(module, _LISTS):
        return
    seen.add(module)
    yield module
    for child in () if isinstance(module, _WHOLE) else module.children():
        yield from _modules(child, seen)


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    lists = (child for child in module.children() if isinstance(child, _LISTS))
    for owner in (module, *lists):
        yield from owner.parameters(recurse=isinstance(module, _WHOLE))


def in_chunks(units: Iterable[Unit], *, chunk_bytes: int) -> list[list[Unit]]:
    """Return consecutive units with equal dtypes, in chunks of at most `chunk_bytes`.

    A module larger than a chunk is a separate chunk.
    """
    chunks: list[list[Unit]] = []
    num_bytes = 0
    for unit in units:
        if chunks and chunks[-1][-1].dtypes == unit.dtypes:
            num_bytes += unit.num_bytes
            if num_bytes <= chunk_bytes:
                chunks[-1].append(unit)
                continue
        num_bytes = unit.num_bytes
        chunks.append([unit])
    return chunks
