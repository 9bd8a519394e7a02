"""One stage of a model that was written for one process, run by the model's own forward.

What other stages compute is computed here on the meta device: shapes without numbers, and without
memory. Where this stage begins the received hidden states take the place of what came before, and
where it ends they are kept for the next one. So the code of the model runs as it is, whatever it
does before, between and after its blocks.

A stage has its blocks, and the parameters that are used outside of blocks on its side; other
parameters of the model are plain tensors on the meta device. All that is real is right, because the
inputs of the whole model are given to every stage: a result that needed another stage is on the
meta device.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
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
    module: nn.Module,
    replaced: dict[int, nn.Module],
    elsewhere: Mapping[int, torch.Tensor],
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
    parameters = values["_parameters"].items()
    values["_parameters"] = {name: each for name, each in parameters if id(each) not in elsewhere}
    values |= {name: elsewhere[id(each)] for name, each in parameters if id(each) in elsewhere}
    values["_modules"] = {
        name: None if child is None else with_blocks(child, replaced, elsewhere)
        for name, child in module._modules.items()  # noqa: SLF001 - children that are None, too
    }
    twin.__dict__.update(values)
    return twin


def on_meta(values: Any) -> Any:  # noqa: ANN401
    """Return the values with all tensors on the meta device."""
    return tree_map_only(
        torch.Tensor,
        lambda each: each if each.is_meta else torch.empty_strided(
            each.shape, each.stride(), dtype=each.dtype, device="meta"
        ),
        values,
    )  # fmt: skip


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


class ModelStage(nn.Module):
    """A stage of a model: `PipelineStage` runs it.

    Args:
        model: whose blocks are an `nn.ModuleList`.
        blocks: that list.
        part: what of it the stage has.
        elsewhere: on the meta device, by their ids, the parameters of other stages out of blocks.
        recompute: whether blocks are computed again in the backward pass.

    Attributes:
        model: the model's own class, with this stage's parameters under the model's names.
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
        self._part, self._recompute, self._mode = part, recompute, _Elsewhere()
        self._received: torch.Tensor | None = None
        self._left: torch.Tensor | None = None
        routed = RoutedBlocks(len(blocks), self.blocks, self)
        self.model = with_blocks(model, {id(blocks): routed}, elsewhere)

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, S, D) for the next stage, or the model's outputs.

        Args:
            x: of the stage before, or the model's inputs.
            inputs: of the model, for all stages.

        Raises:
            InputError: the model computes here with what another stage has.
        """
        part = self._part
        if part.is_first and part.is_last:
            outputs: torch.Tensor = self.model(inputs)
            return outputs
        self._received, self._mode.where = x, "here" if part.is_first else "elsewhere"
        try:
            with self._mode:
                outputs = self.model(inputs)
        finally:
            left, self._received, self._left = self._left, None, None
        found = outputs if part.is_last else left
        if not isinstance(found, torch.Tensor) or found.is_meta:
            raise InputError(
                f"{type(self.model).__name__} did not come to the end of a pipeline stage",
                "call every block once, in order, or plan with --pp 1",
            )
        return found

    def run_block(self, number: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the hidden states behind a block."""
        if number == 0:
            x = self._cross(0, x)
        if number in self.blocks:
            x = self._run(number, x, args, kwargs)
        return self._cross(number + 1, x)

    def _cross(self, num_before: int, x: torch.Tensor) -> torch.Tensor:
        """Enter or leave the stage, where it begins or ends behind so many blocks."""
        part = self._part
        if num_before == part.blocks.start and not part.is_first:
            assert self._received is not None  # noqa: S101 - `forward` was called
            x, self._mode.where = self._received, "here"
        if num_before == part.blocks.stop and not part.is_last:
            self._left, self._mode.where = x, "elsewhere"
            return torch.empty_like(x, device="meta", requires_grad=False)
        return x

    def read_block(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return an attribute of a block of this stage.

        Raises:
            InputError: another stage has the block.
        """
        if number not in self.blocks:
            raise _missing(f"the model's forward, which reads {name} of block {number},")
        return getattr(self.blocks[number], name)

    def _run(
        self, number: int, x: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        block: Callable[..., Any] = self.blocks[number]
        if has_meta((x, args, kwargs)):
            raise _missing(f"block {number}")
        if self._recompute and torch.is_grad_enabled():
            block = partial(checkpoint, block, use_reentrant=False)
        with self._mode.unseen():
            found = block(x, *args, **kwargs)
        if not isinstance(found, torch.Tensor) or found.shape != x.shape:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else ""
            raise InputError(
                f"block {number} returns a {type(found).__name__} {shape}, its hidden states are "
                f"{tuple(x.shape)}",
                "return one tensor of that shape",
            )
        return found


class _Elsewhere(TorchFunctionMode):
    """Computes on the meta device what depends on other stages.

    Attributes:
        where: "elsewhere", before and behind the stage, where tensors on the meta device may meet
            others; "here", where none may; "block", where none is.
    """

    where: Literal["elsewhere", "here", "block"] = "here"

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Run a block, whose functions need not pass here: each takes the host 3 µs longer."""
        before, self.where = self.where, "block"
        is_last = overrides._get_current_function_mode() is self  # noqa: SLF001 - of the model's own
        try:
            with overrides._pop_mode_temporarily() if is_last else nullcontext():  # noqa: SLF001
                yield
        finally:
            self.where = before

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if self.where == "block" or not has_meta((args, kwargs)):
            return func(*args, **kwargs)
        # Some of torch's functions return numbers for a real tensor and one on the meta device.
        args, kwargs = on_meta((args, kwargs))
        found = func(*args, **kwargs)
        if self.where == "here" and has_meta(found):
            raise _missing(getattr(func, "__name__", str(func)))
        return found


def has_meta(values: Any) -> bool:  # noqa: ANN401
    """Return whether a tensor among the values is on the meta device."""
    return any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(values))


def _missing(what: str) -> InputError:
    return InputError(
        f"{what} takes a tensor that another pipeline stage computes, as well as the hidden states",
        "compute it in a block, or of the inputs and buffers alone, or plan with --pp 1",
    )
