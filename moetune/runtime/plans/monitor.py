"""Watch some calls of a layer while it trains: their steps and operations, without ever waiting.

A `LayerMonitor` times the calls that its observers want, by the timers of `timers`, and gives them
each one when its backward pass has ended. Observers report to a service (`reports`), and look for
operations whose time changes (`drift`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from moetune.domain.constraints import Strategy
from moetune.domain.operations import OperationTimes, operations_of, predicted_seconds
from moetune.domain.plan import Decision, Plan
from moetune.runtime.plans.timers import CallWatch, Clock, Watch, device_clock
from moetune.runtime.trace import TimelineRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCall:
    """One call of a layer, with the number of tokens of a plan.

    Args:
        number: of the layer's calls with that number of tokens, from 1.
        seconds: the pipelined part, forward and backward.
        operations: of the call's phases.
    """

    plan: Plan
    decision: Decision
    number: int
    seconds: float
    operations: tuple[OperationTimes, ...]


class CallObserver(Protocol):
    """Observer of some of a layer's calls."""

    def wants(self, plan: Plan, decision: Decision, number: int) -> bool:
        """Return whether to watch the call that begins now, the `number`-th of its size."""

    def take(self, call: ObservedCall) -> None:
        """Receive a call that some observer wanted, after its backward pass."""


def first_of_each_size(plans: Sequence[Plan], memory_reuse: Strategy | None) -> tuple[Plan, ...]:
    """Return the plans that predict a layer's calls: of equal sizes the one that is looked up.

    Args:
        memory_reuse: the strategy that the layer's arguments set, None if they set none; a plan
            predicts only its own.
    """
    by_tokens: dict[int, Plan] = {}
    for plan in plans:
        by_tokens.setdefault(plan.tokens_per_rank, plan)
    first = by_tokens.values()
    return tuple(plan for plan in first if memory_reuse in {None, plan.memory.strategy})


class LayerMonitor:
    """Watches some of one layer's calls.

    Args:
        plans: those that predict the layer's calls, one for each size.
        clock: of the timers.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        observers: Sequence[CallObserver],
        clock: Clock = device_clock,
    ) -> None:
        self._observers, self._clock = observers, clock
        self._plans = {plan.tokens_per_rank: plan for plan in plans}
        self._num_calls: dict[int, int] = {}
        self._pending: tuple[CallWatch, Plan, Decision, int] | None = None

    def watch(self, tokens_per_rank: int, device: torch.device, decision: Decision) -> Watch:
        """Return the timer of a call, and pass on the one watched before if it has ended."""
        plan = self._plans.get(tokens_per_rank)
        if plan is None:
            return Watch()
        self.collect()
        number = self._num_calls[tokens_per_rank] = self._num_calls.get(tokens_per_rank, 0) + 1
        if not any(observer.wants(plan, decision, number) for observer in self._observers):
            return Watch()

        def note(call: CallWatch) -> None:
            self._pending = call, plan, decision, number

        return CallWatch(
            self._clock, device, tokens_per_rank=tokens_per_rank, note=note,
            recorder=TimelineRecorder(device, follows_transfers=False),
        )  # fmt: skip

    def collect(self) -> None:
        """Give the watched call to the observers, if its backward pass has ended."""
        if self._pending is None or not self._pending[0].is_over():
            return
        (watch, plan, decision, number), self._pending = self._pending, None
        seconds, recorder = watch.seconds(), watch.recorder
        if seconds is None:
            return
        call = ObservedCall(
            plan=plan, decision=decision, number=number, seconds=sum(seconds),
            operations=tuple(_operation_times(plan, decision, recorder)) if recorder else (),
        )  # fmt: skip
        for observer in self._observers:
            observer.take(call)


def _operation_times(
    plan: Plan, decision: Decision, recorder: TimelineRecorder
) -> Iterator[OperationTimes]:
    """Yield the times of a recorded call's operations, and what the plan predicts of them."""
    for operation in operations_of(plan.workload, decision):
        seconds = recorder.seconds(plan.workload, operation)
        if seconds is not None:
            predicted = predicted_seconds(plan, operation)
            yield OperationTimes(
                operation=operation, predicted_seconds=predicted, seconds=(seconds,)
            )
