"""Hooks into a model, for the `manager`: module calls, reads of parameters, changed parameters."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from moetune.domain.errors import InputError

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


class ReadHandler(Protocol):
    """Fetches the values of parameters for the functions that read them."""

    def run(
        self,
        parameters: Sequence["ChunkedParameter"],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - what the function returns
        """Run a function that reads these parameters."""
        ...


class ChunkedParameter(nn.Parameter):
    """A parameter whose memory is freed and filled again: `handler` runs functions that read it.

    Reading freed memory would end the process. Functions of other tensors have no overhead.
    """

    handler: ReadHandler
    chunk_number: int
    name_in_model: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the function returns
        """Run `func` when the values of its parameters are in memory.

        Raises:
            InputError: torch's functions that clip gradients read them, and they are in chunks.
        """
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch's own subclasses
            if func == _READ_GRAD and sys._getframe(1).f_globals["__name__"] == _CLIPS:  # noqa: SLF001 - its caller is not told
                raise InputError(
                    "gradients of a model of moetune.shard are in chunks, and torch's clipping "
                    "would find none in its parameters",
                    "use moetune.clip_grad_norm_(model, max_norm), or the optimizer's",
                )
            if _is_harmless(func):
                return func(*args, **(kwargs or {}))
            parameters = list(_parameters((*args, *(kwargs or {}).values())))
            if not parameters:
                return func(*args, **(kwargs or {}))
            return parameters[0].handler.run(parameters, func, args, kwargs or {})


def intercept_reads(parameter: nn.Parameter, name: str, chunk: int, handler: ReadHandler) -> None:
    """Turn a parameter into a `ChunkedParameter` in place."""
    parameter.__class__ = ChunkedParameter
    assert isinstance(parameter, ChunkedParameter)  # noqa: S101 - for the reader and for mypy
    parameter.handler, parameter.chunk_number, parameter.name_in_model = handler, chunk, name


def is_view(result: object, parameters: Sequence[ChunkedParameter]) -> bool:
    """Return whether a result shares a parameter's memory: reads of it are not intercepted."""
    storages = {each.untyped_storage()._cdata for each in parameters}  # noqa: SLF001 - its identity
    found = result if isinstance(result, list | tuple) else (result,)
    return any(
        isinstance(each, torch.Tensor) and each.untyped_storage()._cdata in storages  # noqa: SLF001
        for each in found
    )


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
