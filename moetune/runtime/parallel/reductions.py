"""Sums of a step's gradients over replicas, beside the last micro-batch's backward pass.

All ranks start them in one order, from the last bucket of the model to the first one: each once the
last micro-batch has added to all of its gradients, and to all of those before it. While exchanges
of tokens are still to come, it waits for the end of the next MoE layer's backward phase: what is
behind a layer's last combine has the link for itself, and what is before its first dispatch delays
it. What a rank has not made by the end is started then, so that no rank ever leaves one out.
"""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import nn

from moetune.comm.transfer import Transfer
from moetune.domain.errors import InputError
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.parallel.parameter_buffer import ParameterBuffer


class Reductions:
    """The sums of buckets: the `GradientQueue` of the stages' MoE layers.

    Args:
        parts: all stages of this rank.
        buckets: of all stages of this rank, in the order of the forward pass.
        num_micro_batches: that add to each gradient, once each.
        late: parameters whose gradients are added to behind the last backward pass.
    """

    def __init__(
        self,
        parts: nn.Module,
        buckets: Sequence[ParameterBuffer],
        *,
        num_micro_batches: int,
        late: Collection[nn.Parameter] = (),
    ) -> None:
        buckets = [one for one in buckets if one.has_replicas]
        behind = {id(one) for one in late}
        is_late = [any(id(one) in behind for one in each.parameters) for each in buckets]
        order = sorted(range(len(buckets)), key=lambda number: (is_late[number], -number))
        self._queue = [buckets[number] for number in order]
        self._num_due = len(buckets) - sum(is_late)
        self._num_micro_batches = num_micro_batches
        self._is_active = False
        self._under_way: list[Transfer] = []
        layers = [
            module for module in parts.modules()
            if isinstance(module, PlannedLayer) and module.communicator.num_ranks > 1
        ]  # fmt: skip
        self._num_phases = len(layers) * num_micro_batches
        for layer in layers:
            layer.gradient_queue = self
        for place, bucket in enumerate(self._queue):
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._added, place, index))

    def begin(self) -> None:
        """Start a step: no gradient is made."""
        self._wait()  # for those of a step that failed
        self._times = [[0] * len(bucket.parameters) for bucket in self._queue]
        self._unmade = [len(bucket.parameters) for bucket in self._queue]
        self._num_started, self._phases_left, self._is_active = 0, self._num_phases, True

    def behind_phase(self) -> None:
        """Start what is made; behind the step's last phase, from now on as it is made."""
        if self._is_active:
            self._phases_left -= 1
            self._start_made()

    def finish(self) -> None:
        """Start the rest, and wait for all.

        Raises:
            CollectiveError: a rank left.
        """
        self._is_active = False
        self._start(len(self._queue))
        self._wait()

    def _added(self, place: int, index: int, _: torch.Tensor) -> None:
        """Note that a micro-batch has added to a gradient."""
        if not self._is_active:
            return
        if place < self._num_started:
            raise InputError(
                "a parameter got more gradients in a step than there are micro-batches, the last "
                "ones after their sum was sent",
                "use torch.utils.checkpoint with use_reentrant=False",
            )
        self._times[place][index] += 1
        if self._times[place][index] == self._num_micro_batches:
            self._unmade[place] -= 1
            if self._phases_left <= 0:
                self._start_made()

    def _start_made(self) -> None:
        made = self._num_started
        while made < self._num_due and not self._unmade[made]:
            made += 1
        self._start(made)

    def _start(self, end: int) -> None:
        for bucket in self._queue[self._num_started : end]:
            self._under_way.append(bucket.reduce())
        self._num_started = max(self._num_started, end)

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, []
        for transfer in under_way:
            transfer.wait()
