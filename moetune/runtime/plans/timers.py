"""Time calls of a layer while it trains, and report some of them to a plan service.

A call is timed around its pipelined part, forward and backward. On a GPU events are recorded in
the stream and read later, between two steps: nothing waits inside of one.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Protocol

import torch

from moetune.domain.constraints import Strategy
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.layer import Phase
from moetune.domain.plan import Plan
from moetune.domain.records import Observation
from moetune.runtime.plans.service import ObservationSender, ServiceConnection

OBSERVATIONS_SCHEMA = "moetune.observations/1"
OBSERVE_EVERY = 50
"""Calls of a layer between two that are timed."""


class Interval(Protocol):
    """A running measurement of one phase."""

    def end(self) -> None:
        """Take the end: now, or on a GPU when the stream gets here."""

    def is_over(self) -> bool:
        """Return whether `seconds` would not wait; called after `end`."""

    def seconds(self) -> float:
        """Return the measured time; on a GPU this waits for the end."""


Clock = Callable[[Phase, torch.device], Interval]
"""Begins an interval."""


def device_clock(phase: Phase, device: torch.device) -> Interval:  # noqa: ARG001 - a `Clock`
    """Begin an interval on the host's clock, or in the device's current stream."""
    return _CudaInterval() if device.type == "cuda" else _HostInterval()


class _HostInterval:
    def __init__(self) -> None:
        self._start = self._end = time.perf_counter()

    def end(self) -> None:
        self._end = time.perf_counter()

    def is_over(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._end - self._start


class _CudaInterval:
    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def end(self) -> None:
        self._end.record()

    def is_over(self) -> bool:
        return bool(self._end.query())

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


class Watch(Protocol):
    """Timer of one call of a layer."""

    def begin(self) -> None:
        """Begin the forward pass of the pipelined part."""

    def follow(self, y_TD: torch.Tensor) -> None:
        """End it; the backward pass of the operation that made `y_TD` is timed too."""


class NoWatch:
    """The timer of a call that is not timed."""

    def begin(self) -> None:
        """Do nothing."""

    def follow(self, y_TD: torch.Tensor) -> None:
        """Do nothing."""


class CallWatch:
    """Timer of one call.

    Args:
        tokens_per_rank: the group's agreed number.
        note: called with this timer when the forward pass ends, unless no gradient can follow.
    """

    def __init__(
        self,
        clock: Clock,
        device: torch.device,
        *,
        tokens_per_rank: int,
        note: Callable[["CallWatch"], None],
    ) -> None:
        self.tokens_per_rank = tokens_per_rank
        self._clock, self._device, self._note = clock, device, note
        self._forward: Interval | None = None
        self._backward: Interval | None = None
        self._is_complete = False

    def begin(self) -> None:
        """Begin the forward pass of the pipelined part."""
        self._forward = self._clock("forward", self._device)

    def follow(self, y_TD: torch.Tensor) -> None:
        """End it, and time the autograd node that made `y_TD`."""
        node = y_TD.grad_fn
        if self._forward is None or node is None:
            return
        self._forward.end()
        node.register_prehook(self._begin_backward)
        node.register_hook(self._end_backward)
        self._note(self)

    def is_over(self) -> bool:
        """Return whether the backward pass has ended, on a GPU there, too."""
        return self._is_complete and self._backward is not None and self._backward.is_over()

    def seconds(self) -> tuple[float, float] | None:
        """Return forward and backward, None while the backward pass has not ended."""
        if not self._is_complete or self._forward is None or self._backward is None:
            return None
        return self._forward.seconds(), self._backward.seconds()

    # A graph that is kept may run backward again: only its first pass counts.

    def _begin_backward(self, _: object) -> None:
        if not self._is_complete:
            self._backward = self._clock("backward", self._device)

    def _end_backward(self, *_: object) -> None:
        if self._backward is not None and not self._is_complete:
            self._backward.end()
            self._is_complete = True


class StepReporter:
    """Reports measured calls of a book's layers to the plan service, on the first rank.

    Args:
        plan_ids: plans that the service knows; others are not reported.
        every: calls of a layer between two that are timed; at least 1.
        clock: of the timers.

    Raises:
        InputError: `every` is below 1.
    """

    def __init__(
        self,
        sender: ObservationSender,
        *,
        plan_ids: Collection[str],
        every: int = OBSERVE_EVERY,
        clock: Clock = device_clock,
    ) -> None:
        if every < 1:
            raise InputError(f"observe_every must be at least 1, got {every}")
        self.sender, self.plan_ids, self.every, self.clock = sender, plan_ids, every, clock
        self._layers: list[LayerReports] = []

    def layer(self, plans: Sequence[Plan], memory_reuse: Strategy | None) -> "LayerReports":
        """Return the reports of one more layer that runs these plans."""
        self._layers.append(LayerReports(self, plans, memory_reuse))
        return self._layers[-1]

    def close(self) -> None:
        """Report the last calls and send what waits, for two seconds at most."""
        for layer in self._layers:
            layer.report()
        self.sender.close()


class LayerReports:
    """Reports of one layer's calls.

    Only calls that a plan has a prediction for are timed: those with its own number of tokens
    and its own strategy.

    Args:
        memory_reuse: the strategy that the layer is told to use, None where it is free.
    """

    def __init__(
        self, reporter: StepReporter, plans: Sequence[Plan], memory_reuse: Strategy | None
    ) -> None:
        self._reporter = reporter
        self._predicted: dict[int, Plan | None] = {}
        for plan in plans:
            is_known = plan.id in reporter.plan_ids
            is_planned = memory_reuse in {None, plan.memory.strategy}
            tokens = plan.workload.tokens_per_rank
            self._predicted.setdefault(tokens, plan if is_known and is_planned else None)
        self._num_calls = 0
        self._timed: tuple[CallWatch, Plan] | None = None

    def watch(self, tokens_per_rank: int, device: torch.device) -> Watch:
        """Return the timer of a call, and report the one timed before where it is over."""
        plan = self._predicted.get(tokens_per_rank)
        if plan is None:
            return NoWatch()
        self.report()
        self._num_calls += 1
        if self._num_calls % self._reporter.every:
            return NoWatch()

        def note(call: CallWatch) -> None:
            self._timed = call, plan

        return CallWatch(self._reporter.clock, device, tokens_per_rank=tokens_per_rank, note=note)

    def report(self) -> None:
        """Hand on the timed call, once its backward pass is over; never wait for it."""
        if self._timed is None or not self._timed[0].is_over():
            return
        (call, plan), self._timed = self._timed, None
        seconds = call.seconds()
        if seconds is not None:
            self._reporter.sender.add(_observation(plan, sum(seconds)))


def post_observations(connection: ServiceConnection, batch: Sequence[Observation]) -> None:
    """Send a batch.

    Raises:
        ServiceError: it was not taken.
    """
    rows = [encode(one) for one in merged(batch)]
    connection.post("/v1/observations", {"schema": OBSERVATIONS_SCHEMA, "observations": rows})


def merged(batch: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return one observation for each plan and decision, with the times of all in their order."""
    alike: dict[tuple[object, ...], list[Observation]] = {}
    for one in batch:
        subject = tuple(getattr(one, item.name) for item in fields(one) if item.name != "seconds")
        alike.setdefault(subject, []).append(one)
    return tuple(
        replace(group[0], seconds=tuple(chain.from_iterable(one.seconds for one in group)))
        for group in alike.values()
    )


def _observation(plan: Plan, seconds: float) -> Observation:
    """Return a call's pipelined part, forward and backward, beside the plan's prediction."""
    return Observation(
        plan_id=plan.id,
        forward_degree=plan.pipeline.forward_degree,
        backward_degree=plan.pipeline.backward_degree,
        tokens_per_rank=plan.workload.tokens_per_rank,
        predicted_seconds=plan.predicted.forward_seconds + plan.predicted.backward_seconds,
        seconds=(seconds,),
        source="training",
    )
