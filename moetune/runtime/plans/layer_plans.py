"""The plans of a layer while it trains, looked up by the group's agreed number of tokens.

`WatchedPlans` has the drift alarm: a warning when a layer's calls permanently take a different
time. It times every fifth call with a plan's number of tokens, and compares it with the job's first
steps. Nothing waits: a call's time is read when a later call begins.
"""

import logging
from collections.abc import Sequence
from typing import Self

import torch

from moetune.domain.constraints import Strategy
from moetune.domain.plan import SAFE_DECISION, Decision, Plan, nearest_plan
from moetune.domain.units import format_seconds
from moetune.fit.drift import WATCH_EVERY, Drift, DriftDetector
from moetune.runtime.plans.timers import CallWatch, Clock, Watch, device_clock

LEAST_SHARE = 0.05
"""The share of a call's time below which a change raises no alarm: it moves no plan."""
_LOGGER = logging.getLogger("moetune")


class LayerPlans:
    """The plans for one layer on one group.

    A copy is the same object. A saved model keeps only its plans, because a search belongs to the
    job.

    Args:
        plans: plans for the layer; without any, every decision is the safe decision.

    Attributes:
        decisions: looked-up decisions by the group's agreed number of tokens.
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

        For a number that was seen before, this is a dictionary access.
        """
        decision = self.decisions.get(tokens)
        if decision is None:
            decision = self.decisions[tokens] = self.look_up(tokens)
        return decision

    def look_up(self, tokens: int) -> Decision:
        """Return the decision in the ranges of the plan for the nearest number of tokens."""
        return nearest_plan(self.plans, tokens).decide(tokens) if self.plans else SAFE_DECISION

    def watch(self, tokens: int, device: torch.device) -> Watch:  # noqa: ARG002 - not timed
        """Return the timer of a training call; in the base class it times nothing."""
        return Watch()


class WatchedPlans(LayerPlans):
    """Plans for a layer whose calls the drift alarm watches; equal layers need only one alarm.

    Args:
        memory_reuse: the strategy that the layer's arguments set, None if they set no strategy;
            only plans with this strategy are watched.
        clock: clock of the timers.
    """

    def __init__(
        self, plans: Sequence[Plan], *, memory_reuse: Strategy | None, clock: Clock = device_clock
    ) -> None:
        super().__init__(plans)
        self._clock = clock
        self._watched = {
            plan.tokens_per_rank: plan for plan in reversed(plans)
            if memory_reuse in {None, plan.memory.strategy}
        }  # fmt: skip
        self._detectors: dict[int, DriftDetector] = {}
        self._num_calls: dict[int, int] = {}
        self._pending: tuple[CallWatch, int] | None = None

    def watch(self, tokens: int, device: torch.device) -> Watch:
        """Return the timer of a call, and read the timer of the previous timed call."""
        if tokens not in self._watched:
            return Watch()
        self._collect()
        number = self._num_calls[tokens] = self._num_calls.get(tokens, 0) + 1
        if number % WATCH_EVERY:
            return Watch()

        def note(call: CallWatch) -> None:
            self._pending = call, number

        return CallWatch(self._clock, device, tokens_per_rank=tokens, note=note)

    def _collect(self) -> None:
        """Compare the timed call with earlier calls, if its backward pass has ended."""
        if self._pending is None:
            return
        (call, number), seconds = self._pending, self._pending[0].seconds()
        if seconds is None:
            return
        self._pending = None
        detector = self._detectors.setdefault(call.tokens_per_rank, DriftDetector())
        change = detector.add(number, sum(seconds))
        if change is not None and abs(change.factor - 1) >= LEAST_SHARE:
            _LOGGER.warning("%s", _words(self._watched[call.tokens_per_rank], change))


def _words(plan: Plan, change: Drift) -> str:
    kind = "longer" if change.factor > 1 else "shorter"
    return (
        f"calls of {plan.tokens_per_rank:,} tokens take {kind} since call {change.since_step:,}: "
        f"{format_seconds(change.seconds)}, {change.factor:.2f} × the "
        f"{format_seconds(change.before_seconds)} of the job's first steps\n"
        f"  plan {plan.id[:6]} may no longer be the best: `moetune verify {plan.id[:6]}` on this "
        "machine measures it, and `moetune profile` the machine"
    )
