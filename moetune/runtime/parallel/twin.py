"""A twin of a model: the same code and tensors, with its blocks called by something else.

What the twin computes where a tensor is not there is computed on the meta device: shapes without
numbers.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only


class PlaceRunner(Protocol):
    """What becomes of a call of a block, and of a look at it."""

    def run_place(
        self,
        number: int,
        x: torch.Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Return the hidden states behind a block's place."""

    def read_place(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return an attribute of a block."""


class Places(nn.ModuleList):
    """A model's blocks in one stage: all can be called, and those of the stage are modules.

    Args:
        num_blocks: of the model.
        blocks: of the stage, by their numbers, under which state dicts know them.
    """

    def __init__(
        self, num_blocks: int, blocks: Mapping[int, nn.Module], runner: PlaceRunner
    ) -> None:
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)
        self._places = [_Place(number, runner) for number in range(num_blocks)]

    def __len__(self) -> int:
        """Return the number of the model's blocks."""
        return len(self._places)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all places."""
        return iter(self._places)

    def __getitem__(self, index: int | slice) -> Any:  # noqa: ANN401 - as nn.ModuleList
        """Return a place, or several."""
        return self._places[index]


class _Place:
    def __init__(self, number: int, runner: PlaceRunner) -> None:
        self._number, self._runner = number, runner

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        return self._runner.run_place(self._number, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__") or name in {"_number", "_runner"}:
            raise AttributeError(name)
        return self._runner.read_place(self._number, name)


def twin_of(
    module: nn.Module,
    blocks: nn.ModuleList,
    places: Places,
    elsewhere: Mapping[int, torch.Tensor],
    known: dict[int, nn.Module] | None = None,
) -> nn.Module:
    """Return a model of the same code and tensors, with other blocks.

    Args:
        blocks: of the model, which `places` take the place of.
        elsewhere: what stands in for a parameter, by the parameter's id.
    """
    known = {id(blocks): places} if known is None else known
    if id(module) in known:
        return known[id(module)]
    twin = known[id(module)] = object.__new__(type(module))
    own = dict(module.__dict__)
    own["_buffers"] = dict(own["_buffers"])
    own["_parameters"] = {
        name: value for name, value in own["_parameters"].items() if id(value) not in elsewhere
    }
    own |= {
        name: elsewhere[id(value)]
        for name, value in module.__dict__["_parameters"].items()
        if id(value) in elsewhere
    }
    own["_modules"] = {
        name: child if child is None else twin_of(child, blocks, places, elsewhere, known)
        for name, child in module._modules.items()  # noqa: SLF001 - children that are None, too
    }
    twin.__dict__.update(own)
    return twin


def has_meta(*values: Any) -> bool:  # noqa: ANN401
    """Return whether a tensor among the values is on the meta device."""
    return any(isinstance(one, torch.Tensor) and one.is_meta for one in tree_leaves(values))


def on_meta(values: Any) -> Any:  # noqa: ANN401
    """Return the values with all tensors on the meta device."""
    return tree_map_only(torch.Tensor, _shape_of, values)


def _shape_of(value: torch.Tensor) -> torch.Tensor:
    if value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
