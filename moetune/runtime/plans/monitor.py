"""The plans of a layer while it trains, and a watch on some of its calls, without ever waiting.

A `LayerMonitor` times the calls that its observers want, by the timers of `timers`, and gives them
each one when its backward pass has ended. Observers report to a service (`reports`), and look for
operations whose time changes (`DriftAlarm`): one warning when one changes for good.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import torch

from moetune.domain.constraints import Strategy
from moetune.domain.operations import Operation, OperationTimes, operations_of, predicted_seconds
from moetune.domain.plan import SAFE_DECISION, Decision, Plan, nearest_plan
from moetune.domain.units import format_seconds
from moetune.fit.drift import WATCH_EVERY, Drift, DriftDetector
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


class LayerPlans:
    """The plans for one layer on one group.

    Copies are the same plans. A saved model keeps its plans alone: what watches and searches
    belongs to the job.

    Args:
        plans: without any, every decision is the safe one.

    Attributes:
        decisions: by the group's agreed number of tokens, of those that were looked up.
    """

    def __init__(self, plans: Sequence[Plan] = ()) -> None:
        self.plans = plans
        self.decisions: dict[int, Decision] = {}

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __reduce__(self) -> tuple[type["LayerPlans"], tuple[Sequence[Plan]]]:
        return LayerPlans, (self.plans,)

    def decide(self, tokens: int) -> Decision:
        """Return the decision for the group's agreed number of tokens.

        A number seen before is a dictionary access.
        """
        decision = self.decisions.get(tokens)
        if decision is None:
            decision = self.decisions[tokens] = self.look_up(tokens)
        return decision

    def look_up(self, tokens: int) -> Decision:
        """Return what the ranges of the plan for the nearest number of tokens say."""
        return nearest_plan(self.plans, tokens).decide(tokens) if self.plans else SAFE_DECISION

    def watch(self, tokens: int, device: torch.device) -> Watch:  # noqa: ARG002 - not timed
        """Return the timer of a call that will be trained on; most calls are not timed."""
        return Watch()


class LayerMonitor(LayerPlans):
    """Plans for one layer, some of whose calls are watched.

    A plan predicts calls of its number of tokens; of equal ones, the first that is looked up.

    Args:
        memory_reuse: the strategy that the layer's arguments set, None if they set none; a plan
            predicts only its own.
        clock: of the timers.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        memory_reuse: Strategy | None,
        observers: Sequence[CallObserver],
        clock: Clock = device_clock,
    ) -> None:
        super().__init__(plans)
        self._observers, self._clock = observers, clock
        first = {plan.tokens_per_rank: plan for plan in reversed(plans)}
        self._watched = {
            tokens: plan
            for tokens, plan in first.items()
            if memory_reuse in {None, plan.memory.strategy}
        }
        self._num_calls: dict[int, int] = {}
        self._pending: tuple[CallWatch, Plan, Decision, int] | None = None

    def watch(self, tokens: int, device: torch.device) -> Watch:
        """Return the timer of a call, and pass on the one watched before if it has ended."""
        plan = self._watched.get(tokens)
        if plan is None:
            return Watch()
        self.collect()
        decision = self.decide(tokens)
        number = self._num_calls[tokens] = self._num_calls.get(tokens, 0) + 1
        if not any(observer.wants(plan, decision, number) for observer in self._observers):
            return Watch()

        def note(call: CallWatch) -> None:
            self._pending = call, plan, decision, number

        return CallWatch(
            self._clock, device, tokens_per_rank=tokens, note=note,
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


MAX_COST_SHARE = 1e-3
"""Share of a layer's steps that watching may cost."""
WATCHING_SECONDS = 2e-4
"""Of a watched call of 16 chunks beyond an unwatched one:
docs/decisions/watch-and-search.md#0054."""
LEAST_SHARE = 0.05
"""Of the call: changes of less time move no plan."""
SETTLING_STEPS = 100
"""An operation that was named is not named again for so long: both its phases have changed."""
_LOGGER = logging.getLogger("moetune")


@dataclass(slots=True)
class DriftAlarm:
    """Observer that compares a layer's operations with those of the job's first steps.

    Every fifth call is watched, and fewer of short steps, so that watching stays cheap.

    Args:
        num_layers: layers of the job that are alike, of which this one stands for all.
    """

    num_layers: int = 1
    _detectors: dict[Operation, DriftDetector] = field(default_factory=dict)
    _every: int = WATCH_EVERY
    _named: dict[str, int] = field(default_factory=dict)

    def wants(self, plan: Plan, decision: Decision, number: int) -> bool:  # noqa: ARG002 - all alike
        """Want every so many-th call."""
        return number % self._every == 0

    def take(self, call: ObservedCall) -> None:
        """Compare the call's operations with those before, and warn of the one that changed."""
        if not self.wants(call.plan, call.decision, call.number):
            return
        step_seconds = max(self.num_layers * call.seconds, 1e-9)
        affordable = math.ceil(WATCHING_SECONDS / (MAX_COST_SHARE * step_seconds))
        self._every = max(WATCH_EVERY, affordable)
        for times in call.operations:
            detector = self._detectors.setdefault(times.operation, DriftDetector())
            change = detector.add(call.number, times.seconds[0])
            if change is not None and self._is_news(times.operation, change, call.seconds):
                _LOGGER.warning("%s", _words(call.plan, times.operation, change))

    def _is_news(self, operation: Operation, change: Drift, call_seconds: float) -> bool:
        change_seconds = operation.degree * abs(change.seconds - change.before_seconds)
        if change_seconds < LEAST_SHARE * call_seconds:
            return False
        last = self._named.get(operation.name)
        if last is not None and change.seen_step - last < SETTLING_STEPS:
            return False
        self._named[operation.name] = change.seen_step
        return True


def _words(plan: Plan, operation: Operation, change: Drift) -> str:
    kind = "longer" if change.factor > 1 else "shorter"
    return (
        f"{operation.words} takes {kind} since step {change.since_step:,}: "
        f"{format_seconds(change.seconds)}, {change.factor:.2f} × the "
        f"{format_seconds(change.before_seconds)} of the job's first steps"
        f"{_against_plan(plan, operation, change.seconds)}\n"
        f"  plan {plan.id[:6]} may no longer be the best: `moetune verify {plan.id[:6]}` on this "
        "machine measures it, and the next plan takes that into account"
    )


def _against_plan(plan: Plan, operation: Operation, seconds: float) -> str:
    """Return ", 1.9 × as planned"; "" where the plan has no time for the operation."""
    planned = predicted_seconds(plan, operation)
    return "" if planned is None else f", {seconds / planned:.2f} × as planned"
