"""Copies of placed experts in state dicts, which must be loaded again to count."""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import torch

from moetune.domain.errors import InputError

StateKind = Literal["parameters", "optimizer"]
"""Content of a state dict."""
EXPERTS_OF: Mapping[StateKind, str] = MappingProxyType(
    {"parameters": "experts", "optimizer": "the optimizer of experts"}
)
_MOST_WATCHED = 64


class StateCopies:
    """Copies of experts that state dicts were given, and whether somebody has written into them.

    `torch.distributed.checkpoint.load` writes into the tensors of a state dict. Those of experts in
    the natural order are the parameters themselves, copies have to be loaded again.
    """

    def __init__(self) -> None:
        self._watched: dict[StateKind, deque[tuple[torch.Tensor, int]]] = {}

    def add(self, kind: StateKind, copy: torch.Tensor) -> None:
        """Watch a copy, whose memory is freed with the state dict."""
        watched = copy.detach()  # counts the writes of all that share the copy's memory
        watched.data = copy.new_empty(0)
        of_kind = self._watched.setdefault(kind, deque(maxlen=_MOST_WATCHED))
        of_kind.append((watched, _num_writes(watched)))

    def forget(self, kind: StateKind) -> None:
        """Watch no more: values of this kind are being loaded."""
        self._watched.pop(kind, None)

    def check(self) -> None:
        """Raise InputError where a copy was written into, and not loaded."""
        for kind, copies in self._watched.items():
            if any(_num_writes(watched) != before for watched, before in copies):
                self.forget(kind)
                raise InputError(
                    f"values were written into a state dict of {EXPERTS_OF[kind]}, and not loaded "
                    "into the layer: a plan has placed its experts, and the state dict has copies",
                    "call load_state_dict, or set_state_dict, after "
                    "torch.distributed.checkpoint.load",
                )


def _num_writes(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001 - torch has no public name
