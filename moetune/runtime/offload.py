"""Activations that leave for host memory in the forward pass and return in the backward pass."""

from dataclasses import dataclass

import torch

from moetune.domain.layer import LayerShape
from moetune.domain.plan_inputs import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Strategy
from moetune.runtime.copies import Copies, Copy
from moetune.runtime.host_pool import HostPool, Loan


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a layer's activations go when they leave the device."""

    pool: HostPool
    copies: Copies


class Offload:
    """What leaves for the host in the forward pass and comes back in the backward pass.

    Host tensors hold all rows by piece and expert, so that phases may have other degrees.

    Args:
        num_rows: that this rank receives in the step.
        like: a tensor of the dtype and device.
        is_needed: False where no backward pass can follow.
    """

    def __init__(
        self,
        strategy: Strategy,
        host: Host,
        *,
        num_rows: int,
        layer: LayerShape,
        like: torch.Tensor,
        is_needed: bool,
    ) -> None:
        self.keeps_input = strategy in OFFLOADS_INPUT
        self.keeps_middle = strategy in OFFLOADS_MIDDLE
        self._copies = host.copies
        widths = {"input": layer.d_model} if self.keeps_input else {}
        if self.keeps_middle:
            names = ("pre", "gate") if layer.activation == "swiglu" else ("pre",)
            widths |= dict.fromkeys(names, layer.d_hidden)
        self._names = list(widths)
        shapes = [(num_rows, width) for width in widths.values()]
        self._loan: Loan | None = host.pool.borrow(shapes, like) if is_needed and shapes else None
        self._saving: dict[tuple[str, int], Copy] = {}

    def save(self, name: str, slot: int, rows: torch.Tensor, mine: slice) -> None:
        """Start copying a chunk's rows to the host, if they go there."""
        if self._loan is not None and name in self._names:
            target = self._loan.tensors[self._names.index(name)][mine]
            self._saving[name, slot] = self._copies.save(rows, target)

    def settle(self, name: str, slot: int) -> None:
        """Wait until a slot's last save is done, before something else is written there."""
        saving = self._saving.pop((name, slot), None)
        if saving is not None:
            saving.wait()

    def settle_all(self) -> None:
        """Wait until all saves are done, so that what was saved can be loaded."""
        for saving in self._saving.values():
            saving.wait()
        self._saving.clear()

    def load(self, name: str, rows: torch.Tensor, mine: slice) -> Copy:
        """Start copying a chunk's rows back."""
        assert self._loan is not None  # noqa: S101 - a backward pass follows a forward one
        return self._copies.load(self._loan.tensors[self._names.index(name)][mine], rows)

    def end(self) -> None:
        """Give the host memory back."""
        if self._loan is not None:
            self._loan.end()
