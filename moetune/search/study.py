"""One search for one number of tokens: an Optuna study in a file of its own.

Optuna stores the trials, so that a killed search resumes with them. What is tried, and when a trial
ends, `solve.layer.online` says: Optuna's own samplers and pruners need more trials to learn a curve
than there are degrees.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import RandomSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from moetune.domain.constraints import STRATEGIES
from moetune.domain.plan import Decision
from moetune.solve.layer.online import (
    REPEATS,
    Space,
    Tried,
    best_tried,
    is_clearly_worse,
    next_decision,
)

_MOST = 2**20
# The same in every study: a resumed one may have other bounds, and Optuna refuses to change
# the choices of a name.
_DISTRIBUTIONS: Mapping[str, BaseDistribution] = {
    "forward_degree": IntDistribution(1, _MOST),
    "backward_degree": IntDistribution(1, _MOST),
    "strategy": CategoricalDistribution(STRATEGIES),
}
_FORWARD, _BACKWARD, _ORDER = "forward_seconds", "backward_seconds", "order"


class TuningStudy:
    """A search to drive step by step: ask for a decision, run one step with it, report its times.

    Args:
        file: the study's own; created where it is missing, else resumed.
        name: of the study.
        space: decisions that may be tried; the trials of a resumed study may lie outside.

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

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Every trial that ended, also those pruned, in order."""
        ended = (TrialState.COMPLETE, TrialState.PRUNED)
        trials = self._study.get_trials(deepcopy=False, states=ended)
        # Older studies may have trials of exchanges in two steps, which nothing runs any more.
        flat = (one for one in trials if one.user_attrs.get("dispatcher", "flat") == "flat")
        return tuple(map(_one_tried, flat))

    @property
    def num_steps(self) -> int:
        """Steps so far: those reported, and one to warm up for each trial."""
        trials = self._study.get_trials(deepcopy=False)
        return sum(len(trial.intermediate_values) + 1 for trial in trials)

    def ask(self) -> Decision | None:
        """Return what to run next; None when the search is over."""
        wanted = next_decision(space=self._space, tried=self.tried)
        if wanted is None:
            return None
        self._study.enqueue_trial({name: getattr(wanted, name) for name in _DISTRIBUTIONS})
        self._trial = self._study.ask(dict(_DISTRIBUTIONS))
        self._trial.set_user_attr(_ORDER, self._space.seed.order)
        return _decision(self._trial)

    def report(self, *, forward_seconds: float, backward_seconds: float) -> bool:
        """Record one step of the trial and return whether the trial goes on."""
        trial = self._trial
        assert trial is not None, "report before ask"  # noqa: S101 - our own bug
        step = len(trial.user_attrs.get(_FORWARD, ()))
        for name, seconds in ((_FORWARD, forward_seconds), (_BACKWARD, backward_seconds)):
            trial.set_user_attr(name, [*trial.user_attrs.get(name, ()), seconds])
        trial.report(forward_seconds + backward_seconds, step)
        measured = _one_tried(trial)
        best = min((one.median_seconds for one in self.tried), default=None)
        is_pruned = best is not None and is_clearly_worse(measured.seconds, best)
        if not is_pruned and step + 1 < REPEATS:
            return True
        if is_pruned:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, measured.median_seconds)
        self._trial = None
        return False

    def best(self) -> Tried:
        """Return the trial that the search chose."""
        return best_tried(space=self._space, tried=self.tried)

    def planned(self) -> Tried | None:
        """Return the trial of the plan's answer; None where it was not tried."""
        return next((one for one in self.tried if one.decision == self._space.seed), None)


def _decision(trial: Trial | FrozenTrial) -> Decision:
    return Decision(order=trial.user_attrs[_ORDER], **trial.params)


def _one_tried(trial: Trial | FrozenTrial) -> Tried:
    return Tried(
        decision=_decision(trial),
        forward_seconds=tuple(trial.user_attrs[_FORWARD]),
        backward_seconds=tuple(trial.user_attrs[_BACKWARD]),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from announcing a study."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
