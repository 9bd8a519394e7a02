"""A layer's part in a search: its decisions, settled or on trial, and the calls that are timed."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

import torch

from moetune.domain.constraints import Strategy
from moetune.domain.plan import Decision, Plan, nearest_plan
from moetune.runtime.plans.timers import CallWatch, Clock, NoWatch, Watch
from moetune.runtime.plans.tuner import TuningTask
from moetune.solve.layer.search_space import search_space
from moetune.solve.layer.settled_ranges import AdaptiveRanges


class Searches(Protocol):
    """The searches of a group, of which one runs at a time.

    Attributes:
        trial: the search under way.
        wanted: the next size to search for, and its layer.
        clock: of the timers.
    """

    trial: "Trial | None"
    wanted: "tuple[LayerSearch, int] | None"
    clock: Clock

    @property
    def has_ended(self) -> bool:
        """Whether no further search begins."""


class LayerSearch:
    """Decisions for all layers with one key: settled by a search, on trial, or the plan's.

    Args:
        search: shared by all layers; it runs one trial at a time.

    Attributes:
        decisions: by number of tokens; cleared when any of them changes.
        ranges: settled decisions, by the plan's id.
    """

    def __init__(
        self, search: "Searches", plans: Sequence[Plan], memory_reuse: Strategy | None
    ) -> None:
        self._memory_reuse = memory_reuse
        self.decisions: dict[int, Decision] = {}
        self.ranges = {plan.id: AdaptiveRanges() for plan in plans}
        self._search, self._plans = search, plans

    def plan(self, tokens: int) -> Plan:
        """Return the plan for that number of tokens."""
        return nearest_plan(self._plans, tokens)

    def settled(self, tokens: int) -> Decision | None:
        """Return the settled decision for that number of tokens."""
        return self.ranges[self.plan(tokens).id].decide(tokens)

    def decide(self, tokens: int) -> Decision:
        """Return the settled decision, else the one on trial, else the plan's."""
        settled = self.settled(tokens)
        if settled is not None:
            return settled
        trial = self._search.trial
        if trial is not None and trial.is_about(self, tokens):
            return trial.decision
        answer = self.plan(tokens).decide(tokens)
        return replace(answer, strategy=self._memory_reuse or answer.strategy)

    def watch(self, tokens: int, device: torch.device) -> Watch:
        """Return the timer of a call of the size on trial; queue a search for another size."""
        search = self._search
        if search.has_ended or not tokens or self.settled(tokens) is not None:
            return NoWatch()
        if search.trial is None or not search.trial.is_about(self, tokens):
            search.wanted = search.wanted or (self, tokens)
            return NoWatch()
        note = search.trial.calls.append
        return CallWatch(search.clock, device, tokens_per_rank=tokens, note=note)

    def settle(self, plan: Plan, tokens: int, decision: Decision) -> None:
        """Settle one size."""
        self.ranges[plan.id] = self.ranges[plan.id].settle(tokens, decision)
        self.decisions.clear()

    def task(self, tokens: int) -> TuningTask | None:
        """Return the search's task for that number of tokens, None if it is settled."""
        plan, reuse = self.plan(tokens), self._memory_reuse
        gap = self.ranges[plan.id].gap(tokens)
        if gap is None:
            return None
        space = search_space(plan=plan, tokens_per_rank=tokens, gap=gap, memory_reuse=reuse)
        return TuningTask(plan=plan, tokens_per_rank=tokens, memory_reuse=reuse, space=space)


@dataclass(slots=True, kw_only=True)
class Trial:
    """The search under way for one size.

    Args:
        decision: on trial now.
        is_warming: the next step is the first with this decision, and is not counted.
        calls: timed in this step.
        idle_steps: steps since the last call of this size.
        num_trials: decisions tried so far, with this one.
        lost_before_seconds: by searches before this one.
        warm_up: what `measured` returned for the step that warmed up.
    """

    layer: LayerSearch
    task: TuningTask
    decision: Decision
    is_warming: bool = True
    calls: deque[CallWatch] = field(default_factory=lambda: deque(maxlen=1024))
    idle_steps: int = 0
    num_trials: int = 1
    lost_before_seconds: float = 0.0
    warm_up: tuple[float, ...] = ()

    def is_about(self, layer: LayerSearch, tokens: int) -> bool:
        """Return whether a layer's calls of that number of tokens belong to this trial."""
        plan = self.task.plan
        is_same = layer is self.layer and layer.plan(tokens) is plan
        return is_same and layer.ranges[plan.id].is_near(tokens, self.task.tokens_per_rank)

    def measured(self) -> tuple[float, ...]:
        """Return mean forward and backward times of this step's calls, and their number.

        () without calls.

        Times of calls with a few more or fewer tokens are scaled to the size of the search. Of a
        call that activation checkpointing runs twice, only the second has a backward pass.
        """
        scaled = [
            [each * self.task.tokens_per_rank / call.tokens_per_rank for each in seconds]
            for call in self.calls
            if (seconds := call.seconds()) is not None
        ]
        means = map(fmean, zip(*scaled, strict=True))
        return (*means, len(scaled)) if scaled else ()
