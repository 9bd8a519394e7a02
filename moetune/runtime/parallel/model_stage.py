"""A stage of a model that was written for one process, run by the model's forward.

What comes before another stage's blocks runs here, too, as blocks may take what it computes of the
inputs and the buffers: parameters that are not here are zeros of one element's memory. Where the
stage begins, the received hidden states take the place of what came before; where it ends, the
forward is left. So the code of the model runs as it is, whatever it does before and behind its
blocks. `chain` has checked before that no tensor goes past the blocks' hidden states.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moetune.domain.errors import InputError


class BlockRunner(Protocol):
    """Takes the calls of a model's blocks, and reads of their attributes."""

    def run_block(self, number: int, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the hidden states behind a block."""

    def read_block(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return an attribute of a block."""


class RoutedBlocks(nn.ModuleList):
    """A model's blocks, whose calls go to a runner.

    Args:
        num_blocks: of the model.
        blocks: of the stage, by their numbers, under which state dicts know them.
    """

    def __init__(
        self, num_blocks: int, blocks: Mapping[int, nn.Module], runner: BlockRunner
    ) -> None:
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)
        self._routed = [_RoutedBlock(number, runner) for number in range(num_blocks)]

    def __len__(self) -> int:
        """Return the number of the model's blocks."""
        return len(self._routed)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all blocks of the model."""
        return iter(self._routed)

    def __getitem__(self, index: int | slice) -> Any:  # noqa: ANN401 - as nn.ModuleList
        """Return a block, or several."""
        return self._routed[index]


class _RoutedBlock:
    def __init__(self, number: int, runner: BlockRunner) -> None:
        self._number, self._runner = number, runner

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        return self._runner.run_block(self._number, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__") or name in {"_number", "_runner"}:
            raise AttributeError(name)
        return self._runner.read_block(self._number, name)


def with_blocks(
    module: nn.Module, replaced: dict[int, nn.Module], elsewhere: Mapping[int, torch.Tensor]
) -> nn.Module:
    """Return a model of the same code and tensors, with other blocks.

    Args:
        replaced: by the id of a module what takes its place; modules that were copied are added.
        elsewhere: what stands in for a parameter, by the parameter's id.
    """
    if id(module) in replaced:
        return replaced[id(module)]
    twin = replaced[id(module)] = object.__new__(type(module))
    values = dict(module.__dict__)
    values["_buffers"] = dict(values["_buffers"])
    named = values["_parameters"].items()
    values["_parameters"] = {name: value for name, value in named if id(value) not in elsewhere}
    values |= {name: elsewhere[id(value)] for name, value in named if id(value) in elsewhere}
    values["_modules"] = {
        name: None if child is None else with_blocks(child, replaced, elsewhere)
        for name, child in module._modules.items()  # noqa: SLF001 - children that are None, too
    }
    twin.__dict__.update(values)
    return twin


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRange:
    """The part of a model that a stage has.

    Args:
        blocks: their numbers.
        is_first, is_last: whether it has what comes before, and after, all blocks.
    """

    blocks: range
    is_first: bool
    is_last: bool


class _LeftError(Exception):
    """Leaves a model's forward behind a stage's last block.

    Args:
        hidden: states behind that block.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class ModelStage(nn.Module):
    """A stage of a model: `PipelineStage` runs it.

    Args:
        model: whose blocks are an `nn.ModuleList`.
        blocks: that list.
        part: what of it the stage has.
        elsewhere: on the meta device, by their ids, parameters of other stages out of blocks.
        recompute: whether blocks are computed again in the backward pass.

    Attributes:
        model: of the model's class, with this stage's parameters under the model's names.
        blocks: the stage's, by their numbers in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: nn.ModuleList,
        part: StageRange,
        elsewhere: Mapping[int, torch.Tensor],
        *,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.blocks = {number: blocks[number] for number in part.blocks}
        self._part, self._recompute, self._num_blocks = part, recompute, len(blocks)
        self._received: torch.Tensor | None = None
        routed = RoutedBlocks(len(blocks), self.blocks, self)
        self.model = with_blocks(model, {id(blocks): routed}, elsewhere)

    def stand_in(self, device: str) -> None:
        """Give what stands in for other stages' parameters zeros, once this stage's are drawn."""
        for module in self.model.modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    zero = torch.zeros((), dtype=value.dtype, device=device)
                    module.__dict__[name] = zero.expand(value.shape)

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, S, D) for the next stage, or the model's outputs.

        Args:
            x: of the stage before, or the model's inputs.
            inputs: of the model, for all stages.

        Raises:
            InputError: the model does not call its blocks.
        """
        self._received = x
        try:
            outputs: torch.Tensor = self.model(inputs)
        except _LeftError as left:
            return left.hidden
        finally:
            self._received = None
        if not self._part.is_last:
            raise InputError(
                f"{type(self.model).__name__} did not come to the end of a pipeline stage",
                "call every block once, in order, or plan with --pp 1",
            )
        return outputs

    def run_block(self, number: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the hidden states behind a block.

        Raises:
            _LeftError: the stage ends there.
        """
        x = self._cross(number, x)
        if number in self.blocks:
            x = self._run(number, x, args, kwargs)
        return self._cross(number + 1, x) if number + 1 == self._num_blocks else x

    def _cross(self, num_before: int, x: torch.Tensor) -> torch.Tensor:
        """Enter or leave the stage, where it begins or ends behind so many blocks."""
        part = self._part
        if num_before == part.blocks.start and not part.is_first:
            assert self._received is not None  # noqa: S101 - `forward` was called
            x = self._received
        if num_before == part.blocks.stop and not part.is_last:
            raise _LeftError(x)
        return x

    def read_block(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return an attribute of a block of this stage.

        Raises:
            InputError: another stage has the block.
        """
        if number not in self.blocks:
            raise InputError(
                f"the model's forward reads {name} of block {number}, which another pipeline stage "
                "has",
                "compute it in the block, or plan with --pp 1",
            )
        return getattr(self.blocks[number], name)

    def _run(
        self, number: int, x: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        block: Callable[..., Any] = self.blocks[number]
        if self._recompute and torch.is_grad_enabled():
            block = partial(checkpoint, block, use_reentrant=False)
        y = block(x, *args, **kwargs)
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            shape = tuple(y.shape) if isinstance(y, torch.Tensor) else ""
            raise InputError(
                f"block {number} returns a {type(y).__name__} {shape}, its hidden states are "
                f"{tuple(x.shape)}",
                "return one tensor of that shape",
            )
        return y
