"""A stage of a model that was written for one process, run by the model's forward.

Code before another stage's blocks runs here, too, because blocks may take what it computes from the
inputs and the buffers. Other stages' parameters are zeros with the memory of a single element.
Where the stage begins, the received hidden states replace the result of earlier blocks; where it
ends, the forward is left. The model's code thus runs unchanged before and after its blocks. `chain`
has checked that no tensor bypasses the blocks' hidden states.
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
    """An object that gets the calls of a model's blocks, and the reads of their attributes."""

    def run_block(self, number: int, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the hidden states after a block."""

    def read_block(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return an attribute of a block."""


class RoutedBlocks(nn.ModuleList):
    """A model's list of blocks, which passes their calls to a runner.

    Args:
        num_blocks: blocks of the whole model.
        blocks: the stage's blocks, by their numbers in the model, as in state dicts.
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
    """Return a model with the same code and tensors, but with other blocks.

    Args:
        replaced: replacement of a module by the module's id; copied modules are added.
        elsewhere: stand-in for a parameter, by the parameter's id.
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
        blocks: numbers of the blocks.
        is_first, is_last: whether the stage has the code before, or after, all blocks.
    """

    blocks: range
    is_first: bool
    is_last: bool


class _LeftError(Exception):
    """The exception that leaves a model's forward after a stage's last block.

    Args:
        hidden: hidden states after that block.
    """

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class ModelStage(nn.Module):
    """A stage of a model, which `PipelineStage` runs.

    Args:
        model: the whole model, whose blocks are an `nn.ModuleList`.
        blocks: the model's list of blocks.
        part: the part of the model that the stage has.
        elsewhere: meta tensors, by parameter id, for other stages' parameters outside of blocks.
        recompute: whether blocks are computed again in the backward pass.

    Attributes:
        model: a module of the model's class, with this stage's parameters under the model's names.
        blocks: the stage's blocks, by their numbers in the model.
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
        """Replace other stages' meta stand-ins with zeros, once this stage's values are drawn."""
        for module in self.model.modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.is_meta:
                    zero = torch.zeros((), dtype=value.dtype, device=device)
                    module.__dict__[name] = zero.expand(value.shape)

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, S, D) for the next stage, or the model's outputs.

        Args:
            x: hidden states of the previous stage, or the model's inputs.
            inputs: the model's inputs, for all stages.

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
        """Return the hidden states after a block.

        Raises:
            _LeftError: the stage ends there.
        """
        x = self._cross(number, x)
        if number in self.blocks:
            x = self._run(number, x, args, kwargs)
        return self._cross(number + 1, x) if number + 1 == self._num_blocks else x

    def _cross(self, num_before: int, x: torch.Tensor) -> torch.Tensor:
        """Enter or leave the stage if it begins or ends after that many blocks."""
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
