"""Gradients that ranks add up once, after the last micro-batch."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from moetune.runtime.gloo_link import link_of
from moetune.runtime.links import Transfer


class SharedGradients:
    """The gradients of some parameters in one buffer, so that one all-reduce adds them up.

    Args:
        parameters: of one dtype, in the same order on all ranks.
        group: the ranks that have the same parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self._buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._link = link_of(group, device=first.device)
        self._views = [
            (parameter, part.view_as(parameter))
            for parameter, part in zip(parameters, self._buffer.split(sizes), strict=True)
        ]

    def begin(self) -> None:
        """Make the gradients zeros of the buffer, which backward passes add to."""
        self._buffer.zero_()
        for parameter, view in self._views:
            parameter.grad = view

    def add_up(self) -> Transfer:
        """Start adding up the ranks' gradients."""
        return self._link.add(self._buffer, "the sum of the gradients")


def share_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup
) -> list[SharedGradients]:
    """Return one buffer for every dtype; none where the group is this rank alone."""
    if dist.get_world_size(group) == 1:
        return []
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [SharedGradients(same, group) for same in by_dtype.values()]
