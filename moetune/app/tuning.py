"""Online search of a training job: an Optuna study per batch size, its result in the store.

The runtime's plan book calls `StudyTuner` between steps; it knows neither Optuna nor the store.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from moetune.domain.errors import MoetuneError
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.runtime.plans.tuner import TuningTask
from moetune.search import TuningStudy

if TYPE_CHECKING:
    from moetune.store import SqlStore

_LOGGER = logging.getLogger("moetune")


class StudyTuner:
    """Implementation of `moetune.runtime.plans.tuner.Tuner`.

    Args:
        folder: of the studies' files.
        hardware_id: of this machine, as results hold for equal machines only.
        stores: opens the store to write.
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
        """Begin a search, or continue the one in its file."""
        how = task.memory_reuse or "planned"
        name = f"{task.plan.id[:16]}-{self._hardware_id}-{how}-{task.tokens_per_rank}"
        self._task = task
        self._study = TuningStudy(file=self._folder / f"{name}.log", name=name, space=task.space)
        return self._next(self._study)

    def tell(self, forward_seconds: float, backward_seconds: float) -> Decision | Settled:
        """Report one step's times; return the next decision to try, or the result."""
        study, trying = self._study, self._trying
        assert study is not None, "tell before begin"  # noqa: S101 - our own bug
        assert trying is not None  # noqa: S101
        if study.report(forward_seconds=forward_seconds, backward_seconds=backward_seconds):
            return trying
        return self._next(study)

    def _next(self, study: TuningStudy) -> Decision | Settled:
        self._trying = study.ask()
        return self._trying or self.settle()

    def best_seconds(self) -> float | None:
        """Return the median of the fastest trial that has ended, None before the first one."""
        tried = () if self._study is None else self._study.tried
        return min((one.median_seconds for one in tried), default=None)

    def settle(self) -> Settled:
        """Store and return the best of what was tried."""
        task, study = self._task, self._study
        assert task is not None, "settle before begin"  # noqa: S101 - our own bug
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
        """Store a result for this machine; without a store the job trains with it all the same."""
        try:
            with self._stores() as store:
                if store.plan(plan.id) is None:
                    store.save_plan(plan)
                store.add_settled(settled)
        except MoetuneError as error:
            _LOGGER.warning("the result of a search could not be stored: %s", error)
