"""Search for better decisions while a job trains: one trial a step, equal on all ranks.

Layers time their calls. After the optimizer `OnlineSearch.step` collects the slowest rank's times,
and the first rank's tuner returns the next decision to try. A "size" is a number of tokens.
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch.distributed as dist

from moetune.comm.gloo import communicator_of
from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerKey
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.runtime.plans.layer_search import LayerSearch, Trial
from moetune.runtime.plans.lost_time import BUDGET_SECONDS, LostTime
from moetune.runtime.plans.shared_tuner import Answer, Measured, SharedTuner
from moetune.runtime.plans.timers import Clock, device_clock
from moetune.runtime.plans.tuner import Tuner, doubt

PATIENCE_STEPS = 100
"""Steps without a call of the size under search, until a search for another size may begin."""


class OnlineSearch:
    """Searches one size after another, with equal decisions on all ranks of a group.

    Sizes that are not searched yet run as planned. All layers must have the search's group.

    Args:
        make_tuner: called when the first search begins, on the first rank only.
        known: results of earlier searches, oldest first.
        group: default, the world.
        clock: of the timers.
        budget_seconds: time that all searches together may lose, see `LostTime`; the step that
            goes beyond it ends them. The first rank's counts.
        report: called on the first rank with what was settled for a plan.

    Attributes:
        trial: the search under way.
        wanted: the next size to search for, and its layer.
        num_changes: decisions that changed since the start.
    """

    def __init__(
        self,
        *,
        make_tuner: Callable[[], Tuner],
        known: Sequence[Settled] = (),
        group: dist.ProcessGroup | None = None,
        clock: Clock = device_clock,
        budget_seconds: float = BUDGET_SECONDS,
        report: Callable[[Plan, Settled], None] | None = None,
    ) -> None:
        self.known, self.clock = tuple(known), clock
        self.trial: Trial | None = None
        self.wanted: tuple[LayerSearch, int] | None = None
        self.num_changes = 0
        self._communicator = communicator_of(group)
        self._shared = SharedTuner(
            self._communicator, make_tuner, budget_seconds=budget_seconds, report=report
        )
        self._layers: dict[tuple[LayerKey, Strategy | None], LayerSearch] = {}

    @property
    def has_ended(self) -> bool:
        """Whether the tuner raised, or the budget is lost."""
        return self._shared.has_ended

    @property
    def lost(self) -> LostTime:
        """What all searches lost; on other ranks than the first, as of its last answer."""
        return self._shared.lost

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
            found = LayerSearch(self, plans, memory_reuse)
            self._layers[key, memory_reuse] = found
            for plan, one in product(plans, self.known):
                if (one.plan_id, one.memory_reuse) == (plan.id, memory_reuse):
                    found.settle(plan, one.tokens_per_rank, one.decision)
        return found

    def step(self) -> None:
        """Agree on the last step's times and on the next decision.

        Once all is settled there is no exchange.
        """
        if self.trial is not None:
            self._advance(self.trial)
        if self.trial is not None or self.has_ended:
            return
        if self.wanted is not None:
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
            trial.is_warming, trial.warm_up = False, trial.measured()
            trial.calls.clear()
            return
        warm_ups, steps = self._shared.measured_everywhere(trial.warm_up, trial.measured())
        trial.calls.clear()
        if not all(steps):
            return
        trial.warm_up = ()
        self._apply(trial, self._shared.ask(lambda tuner: self._tell(tuner, warm_ups, steps)))

    def _tell(
        self, tuner: Tuner, warm_ups: Sequence[Measured], steps: Sequence[Measured]
    ) -> tuple[Decision | Settled, bool]:
        """Report the last step, charge what it lost, and end the search when that is too much."""
        best_seconds = tuner.best_seconds()
        self._shared.charge(warm_ups, best_seconds)
        forward, backward, _ = self._shared.charge(steps, best_seconds)
        said = tuner.tell(forward, backward)
        is_cut = self.lost.is_spent and isinstance(said, Decision)
        return (tuner.settle(), True) if is_cut else (said, False)

    def _begin(self, layer: LayerSearch, tokens: int) -> None:
        task = layer.task(tokens)
        if task is None:
            return
        if task.space.is_single:
            layer.settle(task.plan, tokens, task.space.seed)
            self.num_changes += 1
            return
        self.trial = Trial(
            layer=layer, task=task, decision=task.space.seed,
            lost_before_seconds=self.lost.lost_seconds,
        )  # fmt: skip
        layer.decisions.clear()
        self._apply(self.trial, self._shared.ask(lambda tuner: (tuner.begin(task), False)))

    def _apply(self, trial: Trial, answer: Answer | None) -> None:
        self.num_changes += 1
        if answer is None:
            self.wanted = None
            self._end(trial)
        elif isinstance(answer.said, Settled):
            self._settle(trial, answer.said, is_cut=answer.is_cut)
        elif answer.said != trial.decision:
            trial.decision, trial.is_warming = answer.said, True
            trial.num_trials += 1
            trial.layer.decisions.clear()

    def _settle(self, trial: Trial, settled: Settled, *, is_cut: bool) -> None:
        layer, plan = trial.layer, trial.task.plan
        layer.settle(plan, trial.task.tokens_per_rank, settled.decision)
        self._shared.announce(
            plan, settled,
            num_trials=trial.num_trials, is_cut=is_cut,
            lost_seconds=self.lost.lost_seconds - trial.lost_before_seconds,
            doubts=doubt(layer.ranges[plan.id].violations),
            is_reported=trial.task.memory_reuse in {None, plan.memory.strategy},
        )  # fmt: skip
        self._end(trial)

    def _end(self, trial: Trial) -> None:
        trial.layer.decisions.clear()
        self.trial = None
