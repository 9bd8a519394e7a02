"""Data-parallel gradients of a model with experts: for DistributedDataParallel, and for stages.

`prepare_ddp` is for users' own training loops; `stages` sums gradients in buffers.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from moetune.comm.gloo import communicator_of
from moetune.comm.transfer import Transfer
from moetune.runtime.moe.layer import MoELayer


def prepare_ddp(model: nn.Module) -> nn.Module:
    """Make `model` ready for DistributedDataParallel and return it.

    The wrapper then ignores experts, which have no replicas. Their gradients are sums over the
    ranks' tokens already, while the wrapper averages the others'. Scaled by 1 / ranks here, they
    fit the same learning rate, and a step equals one on the whole batch.
    """
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    for prefix, module in model.named_modules():
        if not isinstance(module, MoELayer):
            continue
        share = 1 / module.communicator.num_ranks
        for name, parameter in module.experts.named_parameters():
            path = ".".join(filter(None, (prefix, "experts", name)))
            if path not in ignored:
                ignored.append(path)
            if parameter.requires_grad and not hasattr(parameter, "moetune_share"):
                parameter.moetune_share = share  # type: ignore[attr-defined] # marks it as done
                parameter.register_hook(lambda grad, share=share: grad * share)
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment] # noqa: SLF001 - the name torch reads
    return model


class GradientBuffer:
    """The gradients of some parameters in one buffer, summed by one all-reduce.

    Args:
        parameters: of one dtype, in the same order on all ranks.
        group: the ranks with replicas of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self._buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._communicator = communicator_of(group)
        self._views = [
            (parameter, part.view_as(parameter))
            for parameter, part in zip(parameters, self._buffer.split(sizes), strict=True)
        ]

    def begin(self) -> None:
        """Zero the buffer and make the parameters' gradients its views."""
        self._buffer.zero_()
        for parameter, view in self._views:
            parameter.grad = view

    def all_reduce(self) -> Transfer:
        """Start summing the ranks' gradients."""
        return self._communicator.all_reduce(self._buffer, "the sum of the gradients")


def gradient_buffers(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup
) -> list[GradientBuffer]:
    """Return one buffer for every dtype; none for a group of one rank."""
    if dist.get_world_size(group) == 1:
        return []
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [GradientBuffer(same, group) for same in by_dtype.values()]
