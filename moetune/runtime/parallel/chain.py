"""A model as a chain of blocks, found by a forward pass on the meta device.

The pass takes no memory and no time, whatever the model's size, and runs no block. It tells the
shapes between stages, which parameters are used before the blocks and which behind them, and
whether the model can be cut at all: a tensor that goes past a block's input would be missing in a
later stage.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from moetune.domain.errors import InputError
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.parallel.twin import Places, on_meta, twin_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What a forward pass tells of a model.

    Args:
        blocks: of the model.
        first, last: ids of the parameters that are used before all blocks, or nowhere, and behind
            them.
        hidden: (B, S, D) between the blocks, on the meta device.
        outputs: of the model, likewise.
        uncuttable: why the model cannot be cut into stages; "" if it can.
    """

    blocks: nn.ModuleList
    first: frozenset[int]
    last: frozenset[int]
    hidden: torch.Tensor
    outputs: torch.Tensor
    uncuttable: str


def find_blocks(model: nn.Module, name: str | None) -> nn.ModuleList:
    """Return a model's blocks: the list of this name, else the only one with layers of experts.

    Raises:
        InputError: there is none of that name, or not one alone.
    """
    lists = {one: each for one, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    if name is not None:
        if name not in lists:
            there = ", ".join(lists) or "none"
            raise InputError(
                f"{type(model).__name__} has no nn.ModuleList {name!r}", f"it has {there}"
            )
        return lists[name]
    found = {one: each for one, each in lists.items() if _has_experts(each)}
    outer = [one for one in found if not any(one.startswith(f"{other}.") for other in found)]
    if len(outer) != 1:
        there = ", ".join(outer) or "none"
        raise InputError(
            f"{type(model).__name__} has no single nn.ModuleList of blocks with layers of experts: "
            f"{there}",
            'name it, as in blocks="layers"',
        )
    return found[outer[0]]


def _has_experts(blocks: nn.ModuleList) -> bool:
    return any(isinstance(each, PlannedLayer) for each in blocks.modules())


def trace_chain(model: nn.Module, blocks: nn.ModuleList, inputs: torch.Tensor) -> Chain:
    """Run a model's forward pass on the meta device, around its blocks.

    Args:
        inputs: (B, S), the model's only argument; only its shape and dtype are used.

    Raises:
        InputError: the model is no chain of blocks, or cannot run without numbers.
    """
    beside = {id(one): name for name, one in _beside(model, blocks).items()}
    stand_ins = {
        id(one): torch.empty_like(one, device="meta", requires_grad=False)
        for one in model.parameters() if id(one) in beside
    }  # fmt: skip
    trace = _Trace(blocks, {id(one): known for known, one in stand_ins.items()})
    places = Places(len(blocks), {}, trace)
    twin = twin_of(model, blocks, places, stand_ins)
    try:
        with trace:
            outputs = twin(on_meta(inputs))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot run on the meta device around its blocks: {error}",
            "call it with one tensor of tokens, keep constants in buffers, and read no values",
        ) from error
    hidden = trace.check(outputs, type(model).__name__, batch=len(inputs))
    sides = trace.sides
    both = sorted(beside[known] for known, used in sides.items() if len(used) > 1)
    between = sorted(beside[known] for known, used in sides.items() if "between" in used)
    uncuttable = trace.skipped or _shared(model, blocks)
    if both or between:
        name = (both or between)[0]
        uncuttable = f"{name} is used on several sides of the blocks, by several pipeline stages"
    last = frozenset(known for known, used in sides.items() if used == {"behind"})
    return Chain(
        blocks=blocks, first=frozenset(beside) - last, last=last, hidden=hidden, outputs=outputs,
        uncuttable=uncuttable,
    )  # fmt: skip


def _beside(model: nn.Module, blocks: nn.ModuleList) -> Mapping[str, nn.Parameter]:
    """Return the parameters that are not of the blocks."""
    inside = {id(one) for one in blocks.parameters()}
    return {name: one for name, one in model.named_parameters() if id(one) not in inside}


def _shared(model: nn.Module, blocks: nn.ModuleList) -> str:
    """Return which parameter of a block something else has, too; "" where none is shared."""
    owners: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for name, one in block.named_parameters():
            if owners.setdefault(id(one), number) != number:
                return f"block {number} shares {name} with block {owners[id(one)]}"
    inside = {id(module) for module in blocks.modules()}
    for path, module in model.named_modules():
        for name, one in module.named_parameters(recurse=False):
            if id(module) not in inside and id(one) in owners:
                return f"{path}.{name} is shared with block {owners[id(one)]}"
    return ""


class _Trace(TorchFunctionMode):
    """Follows what a forward pass computes of parameters and hidden states.

    Args:
        known: id of a parameter, by that of its stand-in.

    Attributes:
        sides: where parameters are used: "before", "between" or "behind" the blocks.
        skipped: says which tensor goes past a block; "" where none does.
    """

    def __init__(self, blocks: nn.ModuleList, known: Mapping[int, int]) -> None:
        super().__init__()
        self._blocks, self._num_blocks, self._known = blocks, len(blocks), known
        self._called = 0
        self._hidden: torch.Tensor | None = None
        # Tensors, so that no id is used twice: of the last block's output, and of what was before.
        self._fresh: dict[int, torch.Tensor] = {}
        self._stale: dict[int, torch.Tensor] = {}
        self.sides: dict[int, set[str]] = {}
        self.skipped = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(one.is_meta for one in given):
            args, kwargs = on_meta((args, kwargs))
        result = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        if made and self._note(given, getattr(func, "__name__", str(func))):
            self._fresh |= {id(one): one for one in made}
        return result

    def _note(self, given: list[torch.Tensor], what: str) -> bool:
        """Note what a function takes; return whether its result depends on parameters."""
        depends = False
        for one in given:
            known = self._known.get(id(one))
            if known is not None:
                self.sides.setdefault(known, set()).add(self._side)
            if id(one) in self._stale:
                self.skipped = self.skipped or f"{what} takes {self._past}"
            depends |= known is not None or id(one) in self._fresh or id(one) in self._stale
        return depends

    @property
    def _side(self) -> str:
        if self._called == 0:
            return "before"
        return "behind" if self._called == self._num_blocks else "between"

    @property
    def _past(self) -> str:
        return f"a tensor that was computed before block {self._called - 1}"

    def run_place(
        self,
        number: int,
        x: Any,  # noqa: ANN401 - what the model gives
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Return what stands for a block's output."""
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
        if self._hidden is not None and (x.shape, x.dtype) != (
            self._hidden.shape, self._hidden.dtype,
        ):  # fmt: skip
            raise InputError(
                f"block {number} takes hidden states {tuple(x.shape)} in {x.dtype}, the first one "
                f"{tuple(self._hidden.shape)} in {self._hidden.dtype}",
                "give all blocks the same shape and dtype",
            )
        if id(x) not in self._fresh:
            self.skipped = self.skipped or f"block {number} takes {self._past}"
        for one in tree_leaves((args, kwargs)):
            if any(id(one) in known for known in (self._known, self._fresh, self._stale)):
                self.skipped = self.skipped or (
                    f"block {number} takes a tensor beside the hidden states that depends on "
                    "parameters"
                )
        self._hidden = torch.empty(x.shape, dtype=x.dtype, device="meta")
        self._stale |= self._fresh
        self._fresh = {id(self._hidden): self._hidden}
        self._called += 1
        return self._hidden

    def read_place(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return an attribute of a block, which one stage alone has."""
        self.skipped = self.skipped or f"its forward reads {name} of block {number}"
        return getattr(self._blocks[number], name)

    def check(self, outputs: object, name: str, *, batch: int) -> torch.Tensor:
        """Return the hidden states.

        Raises:
            InputError: the pass did not call all blocks, or returned no tensor of the batch.
        """
        if self._called != self._num_blocks or self._hidden is None:
            raise InputError(
                f"{name} calls {self._called} of its {self._num_blocks} blocks",
                "call every block once, in order",
            )
        for what, value in (("returns", outputs), ("gives its blocks", self._hidden)):
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != batch:
                found = (
                    tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                )
                raise InputError(
                    f"{name} {what} {found}, not a tensor of {batch} sequences",
                    "keep the sequences in the first dimension",
                )
        return self._hidden
