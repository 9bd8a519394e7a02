"""A model as a chain of blocks, traced by a forward pass on the meta device.

The pass takes no memory and no time for a model of any size, and runs no block. It gives the shapes
between stages, and which parameters are used before and after the blocks. It also shows whether the
model can be cut: a tensor that bypasses a block's input would be missing in a later stage.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from moetune.domain.errors import InputError
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.parallel.model_stage import RoutedBlocks, with_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The facts about a model that a forward pass shows.

    Args:
        blocks: the model's blocks.
        first, last: ids of the parameters that are used before all blocks or nowhere, and after all
            blocks.
        hidden: hidden states (B, S, D) between the blocks, on the meta device.
        outputs: outputs of the model, on the meta device.
        uncuttable: why the model cannot be cut into stages; "" if it can.
    """

    blocks: nn.ModuleList
    first: frozenset[int]
    last: frozenset[int]
    hidden: torch.Tensor
    outputs: torch.Tensor
    uncuttable: str


def find_blocks(model: nn.Module, name: str | None) -> nn.ModuleList:
    """Return a model's blocks: the list of this name, or the only list with layers of experts.

    Raises:
        InputError: no list has that name, or no single list has layers of experts.
    """
    lists = {path: part for path, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    if name is not None:
        if name not in lists:
            there = ", ".join(lists) or "none"
            raise InputError(
                f"{type(model).__name__} has no nn.ModuleList {name!r}", f"it has {there}"
            )
        return lists[name]
    sparse = [
        path
        for path, blocks in lists.items()
        if any(isinstance(module, PlannedLayer) for module in blocks.modules())
    ]
    outer = [path for path in sparse if not any(path.startswith(f"{up}.") for up in sparse)]
    if len(outer) != 1:
        there = ", ".join(outer) or "none"
        raise InputError(
            f"{type(model).__name__} has no single nn.ModuleList of blocks with layers of experts: "
            f"{there}",
            'name it, as in blocks="layers"',
        )
    return lists[outer[0]]


def trace_chain(model: nn.Module, blocks: nn.ModuleList, inputs: torch.Tensor) -> Chain:
    """Run a model's forward pass on the meta device, except its blocks.

    Args:
        inputs: (B, S), the model's only argument; only its shape and dtype are used.

    Raises:
        InputError: the model is no chain of blocks, or cannot run without values.
    """
    inside = {id(value) for value in blocks.parameters()}
    named = model.named_parameters()
    outside = {id(value): name for name, value in named if id(value) not in inside}
    stand_ins = {
        id(value): torch.empty_like(value, device="meta", requires_grad=False)
        for value in model.parameters() if id(value) in outside
    }  # fmt: skip
    trace = _Trace(blocks, {id(stand_in): key for key, stand_in in stand_ins.items()})
    routed = RoutedBlocks(len(blocks), {}, trace)
    twin = with_blocks(model, {id(blocks): routed}, stand_ins)
    try:
        with trace:
            outputs = twin(_on_meta(inputs))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot run on the meta device around its blocks: {error}",
            "call it with one tensor of tokens, keep constants in buffers, and read no values",
        ) from error
    hidden = trace.check(outputs, type(model).__name__, batch=len(inputs))
    uncuttable = trace.skipped or _shared(model, blocks)
    several = [
        outside[key]
        for key, used in trace.sides.items() if len(used) > 1 or "between" in used
    ]  # fmt: skip
    if several:
        name = min(several)
        uncuttable = f"{name} is used on several sides of the blocks, by several pipeline stages"
    last = frozenset(key for key, used in trace.sides.items() if used == {"behind"})
    return Chain(
        blocks=blocks, first=frozenset(outside) - last, last=last, hidden=hidden, outputs=outputs,
        uncuttable=uncuttable,
    )  # fmt: skip


def _shared(model: nn.Module, blocks: nn.ModuleList) -> str:
    """Return which parameter of a block is shared with another module; "" if none is shared."""
    owners: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            if owners.setdefault(id(parameter), number) != number:
                return f"block {number} shares {name} with block {owners[id(parameter)]}"
    inside = {id(module) for module in blocks.modules()}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(module) not in inside and id(parameter) in owners:
                return f"{path}.{name} is shared with block {owners[id(parameter)]}"
    return ""


class _Trace(TorchFunctionMode):
    """A torch function mode that follows what a pass computes from parameters and hidden states.

    Args:
        parameter_of: id of each parameter, by the id of its stand-in.

    Attributes:
        sides: where parameters are used: "before", "between" or "behind" the blocks.
        skipped: describes a tensor that bypasses a block; "" if there is none.
    """

    def __init__(self, blocks: nn.ModuleList, parameter_of: Mapping[int, int]) -> None:
        super().__init__()
        self._blocks, self._parameter_of = blocks, parameter_of
        self._called = 0
        self._hidden: torch.Tensor | None = None
        # Tensors that depend on parameters, which live so that no id is used twice, and how many
        # blocks had been called when each was computed.
        self._made: dict[int, tuple[torch.Tensor, int]] = {}
        self.sides: dict[int, set[str]] = {}
        self.skipped = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        given = _tensors((args, kwargs))
        if any(tensor.is_meta for tensor in given):
            args, kwargs = _on_meta((args, kwargs))
        result = func(*args, **(kwargs or {}))
        made = _tensors(result)
        if made and self._depends(given):
            self._note(given, getattr(func, "__name__", str(func)))
            self._made |= {id(tensor): (tensor, self._called) for tensor in made}
        return result

    def _depends(self, given: list[torch.Tensor]) -> bool:
        return any(id(tensor) in self._parameter_of or id(tensor) in self._made for tensor in given)

    def _note(self, given: list[torch.Tensor], what: str) -> None:
        """Record the parameters that a function takes, and tensors from before the last block."""
        side = "before" if self._called == 0 else "between"
        side = "behind" if self._called == len(self._blocks) else side
        for tensor in given:
            if id(tensor) in self._parameter_of:
                self.sides.setdefault(self._parameter_of[id(tensor)], set()).add(side)
            elif id(tensor) in self._made and self._made[id(tensor)][1] != self._called:
                self._skip(f"{what} takes {self._past}")

    def _skip(self, what: str) -> None:
        self.skipped = self.skipped or what

    @property
    def _past(self) -> str:
        return f"a tensor that was computed before block {self._called - 1}"

    def run_block(self, number: int, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        """Return the stand-in for a block's output."""
        self._check_call(number, x)
        if self._made.get(id(x), (x, -1))[1] != self._called:
            self._skip(f"block {number} takes {self._past}")
        if self._depends(_tensors((args, kwargs))):
            self._skip(
                f"block {number} takes a tensor that depends on parameters, as well as the hidden "
                "states"
            )
        self._hidden = torch.empty(x.shape, dtype=x.dtype, device="meta")
        self._called += 1
        self._made[id(self._hidden)] = self._hidden, self._called
        return self._hidden

    def _check_call(self, number: int, x: object) -> None:
        """Raise InputError if a block is not next, or gets other hidden states than the first."""
        if number != self._called:
            raise InputError(
                f"block {number} is called when {self._called} is next",
                "call every block once, in order",
            )
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            raise InputError(
                f"block {number} is not called with hidden states as its first argument",
                "call blocks as in `x = block(x)`; more arguments may follow",
            )
        first = self._hidden
        if first is not None and (x.shape, x.dtype) != (first.shape, first.dtype):
            raise InputError(
                f"block {number} takes hidden states {tuple(x.shape)} in {x.dtype}, the first "
                f"block {tuple(first.shape)} in {first.dtype}",
                "give all blocks the same shape and dtype",
            )

    def read_block(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return a block's attribute, and record that the model cannot be cut because of it."""
        self._skip(f"its forward reads {name} of block {number}")
        return getattr(self._blocks[number], name)

    def check(self, outputs: object, name: str, *, batch: int) -> torch.Tensor:
        """Return the hidden states; InputError if a block was not called, or sequences are lost."""
        if self._called != len(self._blocks) or self._hidden is None:
            raise InputError(
                f"{name} calls {self._called} of its {len(self._blocks)} blocks",
                "call every block once, in order",
            )
        for what, value in (("returns", outputs), ("gives its blocks", self._hidden)):
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != batch:
                form = type(value).__name__
                form = str(tuple(value.shape)) if isinstance(value, torch.Tensor) else form
                raise InputError(
                    f"{name} {what} {form}, not a tensor of {batch} sequences",
                    "keep the sequences in the first dimension",
                )
        return self._hidden


def _tensors(values: object) -> list[torch.Tensor]:
    return [tensor for tensor in tree_leaves(values) if isinstance(tensor, torch.Tensor)]


def _on_meta(values: Any) -> Any:  # noqa: ANN401
    """Return the values with all tensors on the meta device."""
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor if tensor.is_meta else torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        ),
        values,
    )  # fmt: skip
