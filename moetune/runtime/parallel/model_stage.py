"""One stage of a model that was written for one process, run by the model's own forward.

What other stages compute is computed here on the meta device: shapes without numbers, and without
memory. Where this stage begins the received hidden states take the place of what came before, and
where it ends they are kept for the next one. So the code of the model runs as it is, whatever it
does before, between and after its blocks.

A stage has its blocks, and the parameters that are used beside them; other parameters of the model
are plain tensors on the meta device. All that is real is right, because the inputs of the whole
model are given to every stage: a result that needed another stage is on the meta device.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from moetune.domain.errors import InputError

_Where = Literal["elsewhere", "here", "block"]


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

    @property
    def entry(self) -> int | None:
        """Blocks before the hidden states that the stage receives; None of the first one."""
        return None if self.is_first else self.blocks.start

    @property
    def exit(self) -> int | None:
        """Blocks before the hidden states that the stage sends; None of the last one."""
        return None if self.is_last else self.blocks.stop


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


class ModelStage(nn.Module):
    """A stage of a model: `PipelineStage` runs it.

    Args:
        model: whose blocks are an `nn.ModuleList`.
        blocks: that list.
        part: what of it the stage has.
        elsewhere: on the meta device, by their ids, the parameters of other stages beside blocks.
        recompute: whether blocks are computed again in the backward pass.

    Attributes:
        model: the model's own class, with this stage's parameters under the model's names.
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
        own = {number: blocks[number] for number in part.blocks}
        self._crossing = _Crossing(part=part, blocks=own, recompute=recompute)
        places = Places(len(blocks), own, self._crossing)
        self.model = twin_of(model, blocks, places, elsewhere)

    def forward(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the hidden states (B, S, D) for the next stage, or the model's outputs.

        Args:
            x: of the stage before, or the model's inputs.
            inputs: of the model, for all stages.

        Raises:
            InputError: the model computes here with what another stage has.
        """
        crossing = self._crossing
        if crossing.part.is_first and crossing.part.is_last:
            outputs: torch.Tensor = self.model(inputs)
            return outputs
        crossing.begin(x)
        try:
            with crossing.mode:
                outputs = self.model(inputs)
        finally:
            left, crossing.received, crossing.left = crossing.left, None, None
        found = outputs if crossing.part.is_last else left
        if not isinstance(found, torch.Tensor) or found.is_meta:
            raise InputError(
                f"{type(self.model).__name__} did not come to the end of a pipeline stage",
                "call every block once, in order, or plan with --pp 1",
            )
        return found


class _Elsewhere(TorchFunctionMode):
    """Computes on the meta device what depends on other stages.

    Attributes:
        where: "elsewhere", before and behind the stage, where tensors on the meta device may meet
            others; "here", where none may; "block", where none is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.where: _Where = "here"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if self.where == "block" or not has_meta(args, kwargs):
            return func(*args, **kwargs)
        # Some of torch's functions return numbers for a real tensor and one on the meta device.
        args, kwargs = on_meta((args, kwargs))
        found = func(*args, **kwargs)
        if self.where == "here" and has_meta(found):
            raise _missing(getattr(func, "__name__", str(func)))
        return found


@dataclass(kw_only=True)
class _Crossing:
    """Where a forward pass enters the stage and leaves it.

    Args:
        blocks: of the stage, by their numbers.
        received: hidden states of the stage before.
        left: those for the next one.
    """

    part: StageRange
    blocks: Mapping[int, nn.Module]
    recompute: bool
    received: torch.Tensor | None = None
    left: torch.Tensor | None = None
    mode: _Elsewhere = field(default_factory=_Elsewhere)

    def begin(self, x: torch.Tensor) -> None:
        """Start a forward pass."""
        self.received = x
        self.mode.where = "here" if self.part.is_first else "elsewhere"

    def run_place(
        self,
        number: int,
        x: torch.Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Return the hidden states behind a block's place."""
        if number == 0:
            x = self._cross(0, x)
        if number in self.blocks:
            x = self._run(number, x, args, kwargs)
        return self._cross(number + 1, x)

    def read_place(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return an attribute of a block of this stage.

        Raises:
            InputError: another stage has the block.
        """
        if number not in self.blocks:
            raise _missing(f"the model's forward, which reads {name} of block {number},")
        return getattr(self.blocks[number], name)

    def _cross(self, boundary: int, x: torch.Tensor) -> torch.Tensor:
        if boundary == self.part.entry:
            self.mode.where = "here"
            assert self.received is not None  # noqa: S101 - `begin` was called
            return self.received
        if boundary == self.part.exit:
            self.left = x
            self.mode.where = "elsewhere"
            return torch.empty_like(x, device="meta", requires_grad=False)
        return x

    def _run(
        self, number: int, x: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        block = self.blocks[number]
        if has_meta(x, args, kwargs):
            raise _missing(f"block {number}")
        before, self.mode.where = self.mode.where, "block"
        try:
            if self.recompute and torch.is_grad_enabled():
                found = checkpoint(block, x, *args, use_reentrant=False, **kwargs)
            else:
                found = block(x, *args, **kwargs)
        finally:
            self.mode.where = before
        if not isinstance(found, torch.Tensor) or found.shape != x.shape:
            raise InputError(
                f"block {number} returns {_described(found)}, its hidden states are "
                f"{tuple(x.shape)}",
                "return one tensor of that shape",
            )
        return found


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


def _missing(what: str) -> InputError:
    return InputError(
        f"{what} takes a tensor that another pipeline stage computes, beside the hidden states",
        "compute it in a block, or of the inputs and buffers alone, or plan with --pp 1",
    )


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
