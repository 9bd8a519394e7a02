"""One stage of a model that was written for one process, run by the model's own forward.

What other stages compute is computed here on the meta device: shapes without numbers, and without
memory. Where this stage begins the received hidden states take the place of what came before, and
where it ends they are kept for the next one. So the code of the model runs as it is, whatever it
does before, between and after its blocks.

A stage has its blocks, and the parameters that are used beside them; other parameters of the model
are plain tensors on the meta device. All that is real is right, because the inputs of the whole
model are given to every stage: a result that needed another stage is on the meta device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from moetune.domain.errors import InputError
from moetune.runtime.parallel.twin import Places, has_meta, on_meta, twin_of

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

    @property
    def own_blocks(self) -> Mapping[int, nn.Module]:
        """The stage's blocks, by their numbers in the model."""
        return self._crossing.blocks

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


def _missing(what: str) -> InputError:
    return InputError(
        f"{what} takes a tensor that another pipeline stage computes, beside the hidden states",
        "compute it in a block, or of the inputs and buffers alone, or plan with --pp 1",
    )


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
