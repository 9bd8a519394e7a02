"""A device of torch's own kind for accelerators, written in Python: autograd treats it as a GPU.

Torch's real engine decides here in which thread a backward pass runs; `cuda_kit` cannot show it.
"""

import threading
from typing import Any, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import moetune
from moetune.runtime.moe.turns import current_batch, current_turn

WIDTH = 4


class Elsewhere(torch.Tensor):
    """A tensor that says it is on an accelerator, and computes on the CPU."""

    here: torch.Tensor

    def __new__(cls, here: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, dtype=here.dtype, device=torch.device("elsewhere:0")
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub forgets the class
        cls, func: Any, _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        args, kwargs = pytree.tree_map_only(Elsewhere, lambda each: each.here, (args, kwargs))
        return pytree.tree_map_only(torch.Tensor, Elsewhere, func(*args, **kwargs))


_Function: Any = torch.autograd.Function  # whose `apply` has no types


class _Exchange(_Function):  # type: ignore[misc] # a base of type Any
    """Gives the turn away in both passes, and notes who came when, and in which thread."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: list[Any]) -> torch.Tensor:
        ctx.log = log
        _pause("forward", log)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert grad.device.type == "elsewhere"
        _pause("backward", ctx.log)
        return grad, None


def _pause(phase: str, log: list[Any]) -> None:
    turn = current_turn()
    assert turn is not None
    log.append((phase, current_batch(), threading.current_thread()))
    with turn.given():
        pass


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Elsewhere(torch.ones(WIDTH)))
        self.log: list[tuple[str, int, threading.Thread]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            exchanged: torch.Tensor = _Exchange.apply(x * self.weight, self.log)
            x = exchanged
        return x.sum()


def backward_passes_take_turns() -> None:
    """Both batches' backward passes run in their own threads, one exchange after the other."""
    _setup_privateuseone_for_python_backend("elsewhere")
    model = _Model()
    overlap = moetune.BatchOverlap[torch.Tensor](model, model)
    overlap([Elsewhere(torch.full((WIDTH,), value)) for value in (1.0, 2.0)])
    steps = [(phase, batch) for phase, batch, _ in model.log]
    assert steps == [
        (phase, batch) for phase in ("forward", "backward") for _ in range(2) for batch in range(2)
    ]
    for which in range(2):
        assert len({thread for _, batch, thread in model.log if batch == which}) == 1
    grad = model.weight.grad
    assert isinstance(grad, Elsewhere)
    assert torch.equal(grad.here, torch.full((WIDTH,), 6.0))
