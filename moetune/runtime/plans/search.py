"""Search for better decisions while a job trains: one trial a step, equal on all ranks.

Layers time their calls. After the optimizer `OnlineSearch.step` collects the slowest rank's times,
and the first rank's tuner returns the next decision to try. A "size" is a number of tokens.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Protocol

import torch
import torch.distributed as dist

from moetune.comm.agree import decide_on_first
from moetune.comm.gloo import communicator_of
from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerKey
from moetune.domain.plan import Decision, Plan, nearest_plan
from moetune.domain.records import Settled
from moetune.runtime.plans.timers import CallWatch, Clock, NoWatch, Watch, device_clock
from moetune.solve.layer.search_space import AdaptiveRanges, Space, search_space

PATIENCE_STEPS = 100
"""Steps without a call of the size under search, until a search for another size may begin."""
_LOGGER = logging.getLogger("moetune")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """A search for the best decision for one number of tokens and `memory_reuse`."""

    plan: Plan
    tokens_per_rank: int
    memory_reuse: Strategy | None
    space: Space


class Tuner(Protocol):
    """A search on the group's first rank, one task at a time; `tell` is as in Optuna.

    Both methods return the next decision to try, which may be the last one again, or the search's
    result.
    """

    def begin(self, task: TuningTask) -> Decision | Settled:
        """Begin a search, or continue an unfinished one of the same task."""

    def tell(self, forward_seconds: float, backward_seconds: float) -> Decision | Settled:
        """Report the times of one call's pipelined part on the slowest rank."""


class LayerSearch:
    """Decisions for all layers with one key: settled by a search, on trial, or the plan's.

    Args:
        search: shared by all layers; it runs one trial at a time.

    Attributes:
        decisions: by number of tokens; cleared when any of them changes.
        ranges: settled decisions, by the plan's id.
    """

    def __init__(
        self, search: "OnlineSearch", plans: Sequence[Plan], memory_reuse: Strategy | None
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
        if search.has_failed or not tokens or self.settled(tokens) is not None:
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
    """

    layer: LayerSearch
    task: TuningTask
    decision: Decision
    is_warming: bool = True
    calls: deque[CallWatch] = field(default_factory=lambda: deque(maxlen=1024))
    idle_steps: int = 0

    def is_about(self, layer: LayerSearch, tokens: int) -> bool:
        """Return whether a layer's calls of that number of tokens belong to this trial."""
        plan = self.task.plan
        is_same = layer is self.layer and layer.plan(tokens) is plan
        return is_same and layer.ranges[plan.id].is_near(tokens, self.task.tokens_per_rank)

    def measured(self) -> tuple[float, ...]:
        """Return the mean forward and backward time of this step's calls, () without calls.

        Times of calls with a few more or fewer tokens are scaled to the size of the search. Of a
        call that activation checkpointing runs twice, only the second has a backward pass.
        """
        scaled = [
            [each * self.task.tokens_per_rank / call.tokens_per_rank for each in seconds]
            for call in self.calls
            if (seconds := call.seconds()) is not None
        ]
        return tuple(map(fmean, zip(*scaled, strict=True)))


class OnlineSearch:
    """Searches one size after another, with equal decisions on all ranks of a group.

    Sizes that are not searched yet run as planned. All layers must have the search's group.

    Args:
        make_tuner: called when the first search begins, on the first rank only.
        known: results of earlier searches, oldest first.
        group: default, the world.
        clock: of the timers.

    Attributes:
        trial: the search under way.
        wanted: the next size to search for, and its layer.
        has_failed: the tuner raised, and searching has ended.
        num_changes: decisions that changed since the start.
    """

    def __init__(
        self,
        *,
        make_tuner: Callable[[], Tuner],
        known: Sequence[Settled] = (),
        group: dist.ProcessGroup | None = None,
        clock: Clock = device_clock,
    ) -> None:
        self.known, self.clock = tuple(known), clock
        self.trial: Trial | None = None
        self.wanted: tuple[LayerSearch, int] | None = None
        self.has_failed, self.num_changes = False, 0
        self._make_tuner = make_tuner
        self._tuner: Tuner | None = None
        self._communicator = communicator_of(group)
        self._layers: dict[tuple[LayerKey, Strategy | None], LayerSearch] = {}

    def layer(
        self, key: LayerKey, plans: Sequence[Plan], memory_reuse: Strategy | None
    ) -> LayerSearch:
        """Return the search that all layers with this key share.

        Raises:
            InputError: the layer's group and the search's have different numbers of ranks.
        """
        if key.num_ranks != self._communicator.num_ranks:
            raise InputError(
                f"the layer runs on {key.num_ranks} ranks, the plan book is shared by "
                f"{self._communicator.num_ranks}",
                "open the book with the layer's group: open_planbook(online=True, group=…)",
            )
        found = self._layers.get((key, memory_reuse))
        if found is None:
            found = self._layers[key, memory_reuse] = LayerSearch(self, plans, memory_reuse)
            for plan, one in product(plans, self.known):
                if (one.plan_id, one.memory_reuse) == (plan.id, memory_reuse):
                    found.settle(plan, one.tokens_per_rank, one.decision)
        return found

    def step(self) -> None:
        """Agree on the last step's times and on the next decision.

        Once all sizes are settled there is no exchange.
        """
        if self.trial is not None:
            self._advance(self.trial)
        if self.trial is None and self.wanted is not None:
            (layer, tokens), self.wanted = self.wanted, None
            self._begin(layer, tokens)

    def _advance(self, trial: Trial) -> None:
        if not trial.calls:
            trial.idle_steps += 1
            if self.wanted is not None and trial.idle_steps >= PATIENCE_STEPS:
                self._end(trial)
            return
        trial.idle_steps = 0
        if trial.is_warming:
            trial.is_warming = False
            trial.calls.clear()
            return
        everywhere = self._communicator.all_gather_object(
            trial.measured(), "the agreement on a measured step"
        )
        trial.calls.clear()
        if not all(everywhere):
            return
        forward, backward = (max(phase) for phase in zip(*everywhere, strict=True))
        self._apply(trial, self._ask(lambda tuner: tuner.tell(forward, backward)))

    def _begin(self, layer: LayerSearch, tokens: int) -> None:
        task = layer.task(tokens)
        if task is None:
            return
        if task.space.is_single:
            layer.settle(task.plan, tokens, task.space.seed)
            self.num_changes += 1
            return
        self.trial = Trial(layer=layer, task=task, decision=task.space.seed)
        layer.decisions.clear()
        self._apply(self.trial, self._ask(lambda tuner: tuner.begin(task)))

    def _ask(self, question: Callable[[Tuner], Decision | Settled]) -> Decision | Settled | None:
        """Return the answer of the first rank's tuner, None if it raised; the same on all ranks."""

        def safely() -> Decision | Settled | None:
            try:
                self._tuner = self._tuner or self._make_tuner()
                return question(self._tuner)
            except Exception as error:  # noqa: BLE001 - training goes on without the search
                _LOGGER.warning("the search for better plans ends here: %s", error)
                return None

        return decide_on_first(self._communicator, safely, "the next decision of the search")

    def _apply(self, trial: Trial, answer: Decision | Settled | None) -> None:
        self.num_changes += 1
        if isinstance(answer, Decision):
            if answer != trial.decision:
                trial.decision, trial.is_warming = answer, True
                trial.layer.decisions.clear()
            return
        if answer is None:
            self.wanted, self.has_failed = None, True
        else:
            layer, plan = trial.layer, trial.task.plan
            layer.settle(plan, trial.task.tokens_per_rank, answer.decision)
            if self._communicator.rank == 0:
                _LOGGER.info("%s", _outcome(answer, layer.ranges[plan.id].violations))
        self._end(trial)

    def _end(self, trial: Trial) -> None:
        trial.layer.decisions.clear()
        self.trial = None


def _outcome(settled: Settled, violations: int) -> str:
    one, faster = settled.decision, settled.planned_seconds / settled.median_seconds - 1
    gain = "as planned" if faster <= 0 else f"{100 * faster:.1f} % faster than planned"
    doubt = f"; degrees fall with tokens {violations} times" if violations else ""
    return (
        f"{settled.tokens_per_rank:,} tokens: {one.forward_degree} and {one.backward_degree} "
        f"chunks, strategy {one.strategy}; {settled.num_steps} steps searched, {gain}{doubt}"
    )
