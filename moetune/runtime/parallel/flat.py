"""Gradients of parameters in flat buffers, one for each dtype and device, in a given order."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn


class FlatGradients:
    """Buffers of gradients, cut into ranges of bytes of the order.

    Args:
        parameters: in the order; that of their gradients within each buffer, too.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, parameter in enumerate(parameters):
            groups.setdefault((parameter.dtype, parameter.device), []).append(index)
        self.ends = tuple(accumulate(parameter.nbytes for parameter in parameters))
        self.views: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(parameters)
        self._buffers: list[tuple[torch.Tensor, list[int]]] = []
        for (dtype, device), members in groups.items():
            sizes = [parameters[index].numel() for index in members]
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
            self._buffers.append((buffer, members))
            for index, part in zip(members, buffer.split(sizes), strict=True):
                self.views[index] = part.view_as(parameters[index])

    @property
    def num_bytes(self) -> int:
        """All gradients."""
        return self.ends[-1] if self.ends else 0

    def cut(self, ends: Sequence[int]) -> list[list[torch.Tensor]]:
        """Return the parts of the buffers in each range; a range begins where the last one ends.

        Every element is in one range: that of its first byte.

        Args:
            ends: in bytes of the order, the last one of all gradients.
        """
        places = [[self._elements(buffer, members, end) for end in (0, *ends)]
                  for buffer, members in self._buffers]  # fmt: skip
        ranges = zip(*(list(pairwise(each)) for each in places), strict=True)
        return [
            [
                buffer[low:high]
                for (buffer, _), (low, high) in zip(self._buffers, of_buffers, strict=True)
                if low < high
            ]
            for of_buffers in ranges
        ]

    def _elements(self, buffer: torch.Tensor, members: Sequence[int], end: int) -> int:
        """Return how many elements of a buffer begin before a byte of the order."""
        count, size = 0, buffer.element_size()
        for index in members:
            view = self.views[index]
            begin = self.ends[index] - view.nbytes
            count += max(0, min(view.numel(), -((begin - end) // size)))
        return count
