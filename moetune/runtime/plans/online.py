"""Search for better decisions while a job trains: a trial per step, equal on all ranks.

Layers time their calls. After the optimizer step `OnlineSearch.step` collects the slowest rank's
times, and the first rank's tuner returns the next decision to try. A "size" is a number of tokens.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean

import torch
import torch.distributed as dist

from moetune.comm.agree import decide_on_first
from moetune.comm.gloo import communicator_of
from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerKey
from moetune.domain.plan import Decision, Plan, nearest_plan
from moetune.domain.records import Settled
from moetune.runtime.plans.layer_plans import LayerPlans
from moetune.runtime.plans.timers import CallWatch, Clock, Watch, device_clock
from moetune.runtime.plans.tuner import Tuner, TuningTask, outcome
from moetune.solve.layer.online import AdaptiveRanges, search_space

PATIENCE_STEPS = 100
"""Steps without a call of the searched size, after which another size may be searched."""
_LOGGER = logging.getLogger("moetune")


class LayerSearch(LayerPlans):
    """Decisions for all layers with the same key: settled by a search, on trial, or the plan's.

    The looked-up decisions are forgotten when any of them changes.

    Args:
        search: the search that all layers share; it runs one trial at a time.

    Attributes:
        ranges: settled decisions by the plan's id.
    """

    def __init__(
        self, search: "OnlineSearch", plans: Sequence[Plan], memory_reuse: Strategy | None
    ) -> None:
        super().__init__(plans)
        self._search, self._memory_reuse = search, memory_reuse
        self.ranges = {plan.id: AdaptiveRanges() for plan in plans}

    def plan(self, tokens: int) -> Plan:
        """Return the plan for that number of tokens."""
        return nearest_plan(self.plans, tokens)

    def settled(self, tokens: int) -> Decision | None:
        """Return the settled decision for that number of tokens; None if it is not settled."""
        return self.ranges[self.plan(tokens).id].decide(tokens)

    def look_up(self, tokens: int) -> Decision:
        """Return the settled decision, else the trial's or the plan's, with the plan's kernel."""
        settled, answer = self.settled(tokens), self.plan(tokens).decide(tokens)
        if settled is not None:
            return replace(settled, kernel=answer.kernel)
        trial = self._search.trial
        if trial is not None and trial.is_about(self, tokens):
            return replace(trial.decision, kernel=answer.kernel)
        return replace(answer, strategy=self._memory_reuse or answer.strategy)

    def watch(self, tokens: int, device: torch.device) -> Watch:
        """Return a timer for a call of the size on trial; queue a search for any other size."""
        search = self._search
        if search.has_ended or not tokens or self.settled(tokens) is not None:
            return Watch()
        if search.trial is None or not search.trial.is_about(self, tokens):
            search.wanted = search.wanted or (self, tokens)
            return Watch()
        note = search.trial.calls.append
        return CallWatch(search.clock, device, tokens_per_rank=tokens, note=note)

    def settle(self, plan: Plan, tokens: int, decision: Decision) -> None:
        """Settle the decision for a size.

        Raises:
            InputError: an earlier search settled on different degrees forward and backward.
        """
        _ = decision.degree
        self.ranges[plan.id] = self.ranges[plan.id].settle(tokens, decision)
        self.decisions.clear()

    def task(self, tokens: int) -> TuningTask | None:
        """Return the search task for that number of tokens; None if it is settled."""
        plan, reuse = self.plan(tokens), self._memory_reuse
        ranges = self.ranges[plan.id]
        if ranges.decide(tokens) is not None:
            return None
        space = search_space(
            plan=plan, tokens_per_rank=tokens, around=ranges.around(tokens), memory_reuse=reuse
        )
        return TuningTask(plan=plan, tokens_per_rank=tokens, memory_reuse=reuse, space=space)


_Measured = tuple[float, ...]
"""The mean times of the calls in a rank's step; () without calls."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """The search under way for a size.

    Args:
        decision: the decision on trial.
        is_warming: the next step is the first with this decision, and its time is not used.
        calls: timed calls of this step.
        idle_steps: steps since the last call of this size.
        num_trials: decisions tried so far, including the decision on trial.
    """

    layer: LayerSearch
    task: TuningTask
    decision: Decision
    is_warming: bool = True
    calls: deque[CallWatch] = field(default_factory=lambda: deque(maxlen=1024))
    idle_steps: int = 0
    num_trials: int = 1

    def is_about(self, layer: LayerSearch, tokens: int) -> bool:
        """Return whether a layer's calls of that number of tokens belong to this trial."""
        plan = self.task.plan
        is_same = layer is self.layer and layer.plan(tokens) is plan
        return is_same and layer.ranges[plan.id].is_near(tokens, self.task.tokens_per_rank)

    def measured(self) -> _Measured:
        """Return mean forward and backward times of this step's calls.

        Times of calls with a few more or fewer tokens are scaled to the size of the search. If
        activation checkpointing runs a call twice, only the second run has a backward pass.
        """
        scaled = [
            [time * self.task.tokens_per_rank / call.tokens_per_rank for time in seconds]
            for call in self.calls
            if (seconds := call.seconds()) is not None
        ]
        return tuple(map(fmean, zip(*scaled, strict=True)))


class OnlineSearch:
    """The online search of one size after another, with equal decisions on all ranks of a group.

    Sizes that are not searched yet run as planned. All layers must have the search's group.

    Args:
        make_tuner: makes the tuner when the first search begins, on the first rank only.
        settled: results of earlier searches, oldest first.
        group: the group; the default is the world.
        clock: clock of the timers.

    Attributes:
        trial: the search under way.
        wanted: the next size to search, with its layer.
        num_changes: decisions that changed since the start.
        has_ended: the tuner raised an error.
    """

    def __init__(
        self,
        *,
        make_tuner: Callable[[], Tuner],
        settled: Sequence[Settled] = (),
        group: dist.ProcessGroup | None = None,
        clock: Clock = device_clock,
    ) -> None:
        self.settled, self.clock = tuple(settled), clock
        self.trial: Trial | None = None
        self.wanted: tuple[LayerSearch, int] | None = None
        self.num_changes, self.has_ended = 0, False
        self._communicator = communicator_of(group)
        self._make_tuner = make_tuner
        self._tuner: Tuner | None = None
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
        layer = self._layers.get((key, memory_reuse))
        if layer is None:
            layer = self._layers[key, memory_reuse] = LayerSearch(self, plans, memory_reuse)
            for plan, settled in product(plans, self.settled):
                if (settled.plan_id, settled.memory_reuse) == (plan.id, memory_reuse):
                    layer.settle(plan, settled.tokens_per_rank, settled.decision)
        return layer

    def step(self) -> None:
        """Agree on the last step's times and on the next decision.

        Once all sizes are settled there is no exchange.

        Raises:
            CollectiveError: the exchange failed.
        """
        if self.trial is not None:
            self._advance(self.trial)
        if self.trial is None and not self.has_ended and self.wanted is not None:
            (layer, tokens), self.wanted = self.wanted, None
            self._begin(layer, tokens)

    def _advance(self, trial: Trial) -> None:
        if not trial.calls:
            trial.idle_steps += 1
            if self.wanted is not None and trial.idle_steps >= PATIENCE_STEPS:
                self._end(trial)
            return
        trial.idle_steps = 0
        measured = trial.measured()
        trial.calls.clear()
        if trial.is_warming:
            trial.is_warming = False
            return
        steps = self._communicator.all_gather_object(measured, "the agreement on a measured step")
        if all(steps):
            slowest_seconds = sum(map(max, zip(*steps, strict=True)))
            self._ask(trial, lambda tuner: tuner.tell(slowest_seconds))

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
        self._ask(self.trial, lambda tuner: tuner.begin(task))

    def _ask(self, trial: Trial, question: Callable[[Tuner], Decision | Settled]) -> None:
        """Ask the first rank's tuner, and apply its answer on every rank."""

        def safely() -> Decision | Settled | None:
            try:
                self._tuner = self._tuner or self._make_tuner()
                return question(self._tuner)
            except Exception as error:  # noqa: BLE001 - training goes on without the search
                _LOGGER.warning("the search for better plans ends here: %s", error)
                return None

        answer = decide_on_first(self._communicator, safely, "the next decision of the search")
        self.num_changes += 1
        if answer is None:
            self.has_ended, self.wanted = True, None
            self._end(trial)
        elif isinstance(answer, Settled):
            self._settle(trial, answer)
        elif answer != trial.decision:
            trial.decision, trial.is_warming = answer, True
            trial.num_trials += 1
            trial.layer.decisions.clear()

    def _settle(self, trial: Trial, settled: Settled) -> None:
        """Settle the trial's size; the first rank logs it."""
        layer, plan = trial.layer, trial.task.plan
        layer.settle(plan, trial.task.tokens_per_rank, settled.decision)
        if self._communicator.rank == 0:
            violations = layer.ranges[plan.id].violations
            _LOGGER.info("%s", outcome(settled, trial.num_trials, violations=violations))
        self._end(trial)

    def _end(self, trial: Trial) -> None:
        trial.layer.decisions.clear()
        self.trial = None
