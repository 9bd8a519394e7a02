"""Gradients that FSDP2 does not reduce, summed over the ranks behind a step's last pass."""

from collections.abc import Iterable

import torch
from torch import nn

from moetune.comm.gloo import communicator_of
from moetune.runtime.moe.local_parts import is_dtensor
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.optimizer import local_grad


class SummedGradients:
    """What sums the gradients of parameters of a rank's stages.

    Experts are summed over their replicas: those behind an all-to-all have the gradients of their
    whole group's tokens already. All else is summed over the ranks of a stage that have other
    tokens. Parameters without a gradient on this rank count as zeros.

    Args:
        parts: all stages of this rank.
    """

    def __init__(
        self, parts: nn.ModuleList, ranks: ParallelGroups, parameters: Iterable[nn.Parameter]
    ) -> None:
        experts = {
            id(parameter)
            for module in parts.modules() if isinstance(module, PlannedLayer)
            for parameter in module.experts.parameters()
        }  # fmt: skip
        replicas, whole = communicator_of(ranks.replicas), communicator_of(ranks.whole)
        self._summed = [
            (parameter, replicas if id(parameter) in experts else whole)
            for parameter in parameters
        ]  # fmt: skip

    def over_replicas(self) -> None:
        """Sum the gradients in place.

        Raises:
            CollectiveError: a rank left.
        """
        transfers = []
        for parameter, ranks in self._summed:
            if is_dtensor(parameter) and is_dtensor(parameter.grad):  # some are whole, or summands
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            if ranks.num_ranks == 1:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad = local_grad(parameter)
            assert grad is not None  # noqa: S101 - it is there by now
            transfers.append(ranks.all_reduce(grad, "the sum of the gradients"))
        for transfer in transfers:
            transfer.wait()
