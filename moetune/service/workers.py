"""Worker threads for the planner's blocking calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread

from moetune.app.planner import ServicePlanner
from moetune.service.known_plans import KnownPlans
from moetune.service.metrics import Metrics

P = ParamSpec("P")
T = TypeVar("T")
_NUM_READERS = 8
_NUM_SOLVERS = 40
"""They wait for the processes that solve, and for plans that another request solves."""
_NUM_WRITERS = 4
_NUM_CHECKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPools:
    """One application's planner, and threads for its blocking calls.

    Each kind of call has its own threads, so that requests that wait for new plans do not delay
    those for stored plans, or the health check.
    """

    planner: ServicePlanner
    metrics: Metrics
    readers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_READERS))
    solvers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_SOLVERS))
    writers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_WRITERS))
    checkers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_CHECKERS))
    known_plans: KnownPlans = field(default_factory=KnownPlans)

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a look-up, or the parsing of a body."""
        return await _run(self.readers, work, *args, **kwargs)

    async def plan_document(self, plan_id: str) -> str | None:
        """Return the JSON of the plan with exactly this id; None where there is none."""

        async def read(plan_ids: Sequence[str]) -> Mapping[str, str]:
            return await self.read(self.planner.reading.plan_documents, plan_ids)

        return await self.known_plans.document(plan_id, read)

    async def solve(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that may solve for a plan."""
        return await _run(self.solvers, work, *args, **kwargs)

    async def write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that stores rows."""
        return await _run(self.writers, work, *args, **kwargs)

    async def check(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a check of the store; when the wait is cancelled, the thread goes on to its end."""
        return await to_thread.run_sync(
            partial(work, *args, **kwargs), limiter=self.checkers, abandon_on_cancel=True
        )


async def _run(
    limiter: CapacityLimiter, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    return await to_thread.run_sync(partial(work, *args, **kwargs), limiter=limiter)
