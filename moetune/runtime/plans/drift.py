"""The drift alarm of a job: one warning when an operation's time changes while the job trains."""

import logging
import math
from dataclasses import dataclass, field

from moetune.domain.operations import Operation, predicted_seconds
from moetune.domain.plan import Decision, Plan
from moetune.domain.units import format_seconds
from moetune.fit.drift import WATCH_EVERY, Drift, DriftDetector
from moetune.runtime.plans.monitor import ObservedCall

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
