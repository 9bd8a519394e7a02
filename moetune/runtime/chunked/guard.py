"""Parameters that ask for their chunk where no module of theirs has."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

_HARMLESS = frozenset(
    {
        "__set__", "__hash__", "__len__", "__reduce_ex__", "dim", "element_size",
        "is_complex", "is_contiguous", "is_floating_point", "is_pinned", "ndimension", "nelement",
        "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
        "size", "storage_offset", "stride", "untyped_storage",
    }
)  # fmt: skip
_VIEWS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


class Keeper(Protocol):
    """Knows where the values of a parameter are."""

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
    """A parameter whose memory comes and goes: every function that reads it asks its keeper.

    Reading freed memory would end the process. Functions on other tensors cost nothing more.
    """

    keeper: Keeper
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
        """Run `func` once the values of its parameters are there."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - what torch's own subclasses call
            if _is_harmless(func):
                return func(*args, **(kwargs or {}))
            parameters = list(_parameters((*args, *(kwargs or {}).values())))
            if not parameters:
                return func(*args, **(kwargs or {}))
            return parameters[0].keeper.run(parameters, func, args, kwargs or {})


def guard(parameter: nn.Parameter, name: str, chunk: int, keeper: Keeper) -> None:
    """Make a parameter ask `keeper` before it is read."""
    parameter.__class__ = ChunkedParameter
    assert isinstance(parameter, ChunkedParameter)  # noqa: S101 - for the reader and for mypy
    parameter.keeper, parameter.chunk_number, parameter.name_in_model = keeper, chunk, name


def is_view(result: object, parameters: Sequence[ChunkedParameter]) -> bool:
    """Whether a result has a parameter's memory, and will be read without asking."""
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
