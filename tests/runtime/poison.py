"""Reused buffers of a layer, filled with NaN before each phase: reads of old values are found."""

from collections.abc import Mapping
from typing import Any

import torch

from moetune.runtime.moe.workspace import Shape, Workspace


class _Poisoned(Workspace):
    def buffers(self, shapes: Mapping[str, Shape], like: torch.Tensor) -> dict[str, torch.Tensor]:
        made = super().buffers(shapes, like)
        for buffer in made.values():
            buffer.fill_(torch.nan)
        return made


def poison(layer: Any) -> None:
    """Give a layer such buffers."""
    layer._workspace = _Poisoned()
