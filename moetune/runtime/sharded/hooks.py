"""Hooks into a model, for `ModelChunks`: its units, their calls, and reads of parameters."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moetune.domain.errors import InputError
from moetune.runtime.moe.layer import ExpertLayer

_HARMLESS = frozenset(
    {
        "__set__", "__hash__", "__len__", "__reduce_ex__", "dim", "element_size",
        "is_complex", "is_contiguous", "is_floating_point", "is_pinned", "ndimension", "nelement",
        "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
        "size", "storage_offset", "stride", "untyped_storage",
    }
)  # fmt: skip
"""Functions of a parameter that do not read its values."""
_VIEWS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
"""Attributes that are views of a parameter."""


@dataclass(slots=True, eq=False)
class ModuleCall:
    """A call of a module or of a single function, which holds its chunks forward and backward.

    Args:
        label: name for errors.
        chunks: numbers of the chunks that it reads.
        names: parameters that it reads.
        trainable: those that get gradients.
        has_end: a node of autograd's graph calls back at the end of its backward pass.
        is_open: its backward pass is under way.
    """

    label: str
    chunks: tuple[int, ...]
    names: frozenset[str]
    trainable: frozenset[str] = field(default_factory=frozenset)
    has_end: bool = False
    is_open: bool = False


class _End(torch.autograd.Function):
    """The identity on a call's inputs: its backward runs last in the call, and calls `end`."""

    @staticmethod
    def forward(ctx: Any, end: Callable[[], None], *inputs: torch.Tensor) -> Any:  # noqa: ANN401
        ctx.end = end
        ctx.set_materialize_grads(False)
        return inputs if len(inputs) > 1 else inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # noqa: ANN401
        ctx.end()
        return None, *grads


def with_end(arguments: tuple[Any, Any], end: Callable[[], None]) -> tuple[tuple[Any, Any], bool]:
    """Return the arguments with a node that calls `end`, and whether any needs a gradient."""
    leaves, spec = pytree.tree_flatten(arguments)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
        and leaf.requires_grad
        and not isinstance(leaf, torch.nn.Parameter)
    ]
    if not places:
        return arguments, False
    found = _End.apply(end, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, tensor in zip(places, found if len(places) > 1 else (found,), strict=True):
        leaves[place] = tensor
    return pytree.tree_unflatten(leaves, spec), True


def outputs_of(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors with a gradient in what a module returned."""
    for leaf in (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad and leaf.grad_fn is not None:
                yield leaf
        elif is_dataclass(leaf):
            for each in fields(leaf):
                yield from outputs_of(getattr(leaf, each.name))
        elif isinstance(leaf, Mapping):
            for each_value in leaf.values():
                yield from outputs_of(each_value)


_READ_GRAD: Any = vars(torch.Tensor.__base__)["grad"].__get__
_CLIPS = "torch.nn.utils.clip_grad"


class ChunkedParameter(nn.Parameter):
    """A parameter whose memory is freed and filled again: `is_held` says whether it is there.

    Reading freed memory would end the process. Functions of other tensors have no overhead.
    """

    is_held: Callable[[str], bool]
    name_in_model: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the function returns
        """Run `func`.

        Raises:
            InputError: it reads the values of a parameter outside of the calls of its module, or
                torch's functions that clip gradients read them, and they are in chunks.
        """
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch's own subclasses
            if func == _READ_GRAD and sys._getframe(1).f_globals["__name__"] == _CLIPS:  # noqa: SLF001 - its caller is not told
                raise InputError(
                    "gradients of a model of moetune.shard are in chunks, and torch's clipping "
                    "would find none in its parameters",
                    "use moetune.clip_grad_norm_(model, max_norm), or the optimizer's",
                )
            if not _is_harmless(func):
                for parameter in _parameters((*args, *(kwargs or {}).values())):
                    if not parameter.is_held(parameter.name_in_model):
                        raise InputError(
                            f"{parameter.name_in_model} is read outside of the calls of its "
                            "module, and its values are in chunks",
                            "call the module, share the parameter, as in head.weight = "
                            "embedding.weight, or read moetune.full_state_dict(model)",
                        )
            return func(*args, **(kwargs or {}))


def guard_reads(parameter: nn.Parameter, name: str, is_held: Callable[[str], bool]) -> None:
    """Turn a parameter into a `ChunkedParameter` in place."""
    parameter.__class__ = ChunkedParameter
    assert isinstance(parameter, ChunkedParameter)  # noqa: S101 - for the reader and for mypy
    parameter.is_held, parameter.name_in_model = is_held, name


def _is_harmless(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VIEWS
    return name in _HARMLESS


def _parameters(values: Sequence[Any]) -> Iterator[ChunkedParameter]:
    for value in values:
        if isinstance(value, ChunkedParameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from _parameters(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module that reads parameters itself, not only through its children.

    Args:
        name: of the module in the model.
        parameters: names of its own; also of all its descendants', if it does not call them.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model: modules with parameters of their own.

    Layers of experts, which need all their parameters at once, and `nn.MultiheadAttention`, which
    does not call its children, are one unit with everything below them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(_units(model, "", names, set()))


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
