"""One call of a module: it holds its chunks in its forward, and again in its backward."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(slots=True, eq=False)
class Call:
    """A call of a module or of a single function.

    Args:
        who: for errors.
        chunks: that it needs.
        names: of the parameters that it reads.
        trainable: those that get gradients.
    """

    who: str
    chunks: tuple[int, ...]
    names: frozenset[str]
    trainable: frozenset[str] = field(default_factory=frozenset)
    has_end: bool = False
    is_open: bool = False


class _End(torch.autograd.Function):
    """The inputs; backward, the call's end: nothing of it comes after."""

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
    """Return the arguments with an end behind their tensors, and whether there were any."""
    args, kwargs = arguments
    is_plain = len(args) == 1 and isinstance(args[0], torch.Tensor) and not kwargs
    if is_plain and not isinstance(args[0], torch.nn.Parameter):
        if not args[0].requires_grad:
            return arguments, False
        return ((_End.apply(end, args[0]),), kwargs), True  # type: ignore[no-untyped-call]
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
