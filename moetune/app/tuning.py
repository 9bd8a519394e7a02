"""Online search of a training job: an Optuna study per number of tokens, stored results.

The runtime's plan book calls `StudyTuner` between steps; it knows neither Optuna nor the store.
Optuna stores the trials, so that a killed search resumes with them. `solve.layer.online` decides
what to try and when a trial ends: Optuna's samplers and pruners need more trials to learn a curve
than there are degrees.
"""

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from moetune.domain.constraints import STRATEGIES
from moetune.domain.errors import MoetuneError
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.runtime.plans.tuner import TuningTask
from moetune.solve.layer.online import (
    REPEATS,
    Space,
    Tried,
    best_tried,
    is_clearly_worse,
    next_decision,
)

if TYPE_CHECKING:
    from moetune.store import SqlStore

_LOGGER = logging.getLogger("moetune")
_MAX_DEGREE = 2**20
# The same in every study: a resumed study may have other bounds, and Optuna refuses to change
# the choices of a name.
_DISTRIBUTIONS: Mapping[str, BaseDistribution] = {
    "forward_degree": IntDistribution(1, _MAX_DEGREE),
    "backward_degree": IntDistribution(1, _MAX_DEGREE),
    "strategy": CategoricalDistribution(STRATEGIES),
}
_ORDER = "order"


class TuningStudy:
    """A search to drive step by step: ask for a decision, run a step with it, report its time.

    Args:
        file: the study's file; created if it is missing, else resumed.
        name: name of the study.
        space: decisions that may be tried; trials of a resumed study may lie outside.

    Raises:
        OSError, ValueError: the file cannot be read or written.
    """

    def __init__(self, *, file: Path, name: str, space: Space) -> None:
        self._space = space
        file.parent.mkdir(parents=True, exist_ok=True)
        with _quiet():
            self._study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(file))),
                study_name=name,
                sampler=RandomSampler(),
                load_if_exists=True,
            )
        self._trial: Trial | None = None
        self._seconds: list[float] = []

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Every trial that ended, pruned trials included, in order."""
        ended = (TrialState.COMPLETE, TrialState.PRUNED)
        trials = self._study.get_trials(deepcopy=False, states=ended)
        return tuple(map(_tried, filter(_runs, trials)))

    @property
    def best_seconds(self) -> float | None:
        """Median step of the fastest trial that ended; None before the first."""
        return min((trial.median_seconds for trial in self.tried), default=None)

    @property
    def num_steps(self) -> int:
        """Steps so far: the reported steps, and a warm-up step for each trial."""
        trials = self._study.get_trials(deepcopy=False)
        return sum(len(trial.intermediate_values) + 1 for trial in trials)

    def ask(self) -> Decision | None:
        """Return the decision to run next; None when the search is over."""
        wanted = next_decision(space=self._space, tried=self.tried)
        if wanted is None:
            return None
        self._study.enqueue_trial({name: getattr(wanted, name) for name in _DISTRIBUTIONS})
        self._trial = self._study.ask(dict(_DISTRIBUTIONS))
        self._trial.set_user_attr(_ORDER, self._space.seed.order)
        self._seconds = []
        return _decision(self._trial)

    def report(self, seconds: float) -> bool:
        """Record a step of the trial and return whether the trial goes on."""
        trial = self._trial
        assert trial is not None, "report before ask"  # noqa: S101 - our bug
        trial.report(seconds, len(self._seconds))
        self._seconds.append(seconds)
        best = self.best_seconds
        is_pruned = best is not None and is_clearly_worse(self._seconds, best)
        if not is_pruned and len(self._seconds) < REPEATS:
            return True
        if is_pruned:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, statistics.median(self._seconds))
        self._trial = None
        return False

    def best(self) -> Tried:
        """Return the trial that the search chose."""
        return best_tried(space=self._space, tried=self.tried)

    def planned(self) -> Tried | None:
        """Return the trial of the plan's decision; None if it was not tried."""
        return next((trial for trial in self.tried if trial.decision == self._space.seed), None)


class StudyTuner:
    """Implementation of `moetune.runtime.plans.tuner.Tuner`.

    Args:
        folder: folder of the studies' files.
        hardware_id: this machine's id, as results hold only for equal machines.
        stores: opens the store to write it.
    """

    def __init__(
        self,
        *,
        folder: Path,
        hardware_id: str,
        stores: Callable[[], AbstractContextManager["SqlStore"]],
    ) -> None:
        self._folder, self._hardware_id, self._stores = folder, hardware_id, stores
        self._task: TuningTask | None = None
        self._study: TuningStudy | None = None
        self._trying: Decision | None = None

    def begin(self, task: TuningTask) -> Decision | Settled:
        """Begin a search, or continue the search in its file."""
        how = task.memory_reuse or "planned"
        name = f"{task.plan.id[:16]}-{self._hardware_id}-{how}-{task.tokens_per_rank}"
        self._task = task
        self._study = TuningStudy(file=self._folder / f"{name}.log", name=name, space=task.space)
        return self._next(self._study)

    def tell(self, seconds: float) -> Decision | Settled:
        """Report a step's time; return the next decision to try, or the result."""
        study, trying = self._study, self._trying
        assert study is not None, "tell before begin"  # noqa: S101 - our bug
        assert trying is not None  # noqa: S101
        if study.report(seconds):
            return trying
        return self._next(study)

    def _next(self, study: TuningStudy) -> Decision | Settled:
        self._trying = study.ask()
        return self._trying or self.settle()

    def settle(self) -> Settled:
        """Store and return the best decision that was tried."""
        task, study = self._task, self._study
        assert task is not None, "settle before begin"  # noqa: S101 - our bug
        assert study is not None  # noqa: S101
        best, planned = study.best(), study.planned()
        settled = Settled(
            plan_id=task.plan.id,
            hardware_id=self._hardware_id,
            memory_reuse=task.memory_reuse,
            tokens_per_rank=task.tokens_per_rank,
            decision=best.decision,
            seconds=best.seconds,
            planned_seconds=(planned or best).median_seconds,
            num_steps=study.num_steps,
        )
        self._store(task.plan, settled)
        return settled

    def _store(self, plan: Plan, settled: Settled) -> None:
        """Store a result for this machine; if that fails, log it, as the job can use the result."""
        try:
            with self._stores() as store:
                if store.plan(plan.id) is None:
                    store.save_plan(plan)
                store.add_settled(settled)
        except MoetuneError as error:
            _LOGGER.warning("the result of a search could not be stored: %s", error)


def _decision(trial: Trial | FrozenTrial) -> Decision:
    return Decision(order=trial.user_attrs[_ORDER], **trial.params)


def _tried(trial: FrozenTrial) -> Tried:
    return Tried(decision=_decision(trial), seconds=tuple(trial.intermediate_values.values()))


def _runs(trial: FrozenTrial) -> bool:
    """Return whether a layer can run a trial's decision; trials of older studies may be others."""
    decision, dispatcher = _decision(trial), str(trial.user_attrs.get("dispatcher", "flat"))
    return dispatcher == "flat" and decision.forward_degree == decision.backward_degree


@contextmanager
def _quiet() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
