"""The plans of a layer while it trains, looked up by the group's agreed number of tokens.

`WatchedPlans` has the drift alarm: a warning when a layer's calls take another time for good. Every
fifth call with a plan's number of tokens is timed, and compared with those of the job's first
steps. Nothing waits: a call is read when a later one begins.
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
"""Of a call: smaller changes move no plan."""
_LOGGER = logging.getLogger("moetune")


class LayerPlans:
    """The plans for one layer on one group.

    Copies are the same plans. A saved model keeps its plans alone: what searches belongs to the
    job.

    Args:
        plans: without any, every decision is the safe decision.

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
        """Return the timer of a call that will be trained on: none, but for a search's trials."""
        return Watch()


class WatchedPlans(LayerPlans):
    """Plans for one layer whose calls are watched; equal layers need one alarm.

    Args:
        memory_reuse: the strategy that the layer's arguments set, None if they set none; a plan
            predicts that of its steps alone.
        clock: of the timers.
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
        """Return the timer of a call, and read that of the call before."""
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
        """Compare the call that was timed with those before, if its backward pass has ended."""
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
