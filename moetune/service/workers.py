"""Worker threads for the planner's blocking calls, and batched reads of stored plans.

Waking a thread and opening and closing a transaction takes longer than the rest of an answer.
`KnownPlans` does it once for all requests that have arrived meanwhile; a single request does not
wait for others.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeAlias, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.requests import Request

from moetune.app.planner import ServicePlanner
from moetune.domain.errors import MoetuneError
from moetune.service.metrics import Metrics
from moetune.service.problems import QuotaError, StoreFullError
from moetune.service.quotas import Kind, QuotaLimits, Quotas

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
    quotas: Quotas
    readers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_READERS))
    solvers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_SOLVERS))
    writers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_WRITERS))
    checkers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_CHECKERS))

    @classmethod
    def of(cls, planner: ServicePlanner, limits: QuotaLimits | None = None) -> "WorkerPools":
        """Return the threads over a planner, with limits of what clients add."""
        quotas = Quotas(limits=limits or QuotaLimits(), store_bytes=planner.reading.size_bytes)
        return cls(planner=planner, metrics=Metrics(planner, quotas), quotas=quotas)

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a look-up, or the parsing of a body."""
        return await _run(self.readers, work, *args, **kwargs)

    async def solve(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that may solve for a plan."""
        return await _run(self.solvers, work, *args, **kwargs)

    async def write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that stores rows."""
        return await _run(self.writers, work, *args, **kwargs)

    async def may_add(self, request: Request, kind: Kind, count: int = 1) -> None:
        """Count what a request is about to add.

        Raises:
            QuotaError, StoreFullError: it may not.
        """
        client = request.client.host if request.client else ""
        try:
            await _run(self.readers, self.quotas.take, client, kind, count)
        except (QuotaError, StoreFullError):
            self.metrics.refused(kind, count)
            raise

    async def check(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a check of the store; when the wait is cancelled, the thread goes on to its end."""
        return await to_thread.run_sync(
            partial(work, *args, **kwargs), limiter=self.checkers, abandon_on_cancel=True
        )


async def _run(
    limiter: CapacityLimiter, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    return await to_thread.run_sync(partial(work, *args, **kwargs), limiter=limiter)


_MAX_BATCH = 500
_Answer: TypeAlias = "asyncio.Future[str | None]"


class KnownPlans:
    """Batched reader of plan documents; used from the application's event loop only."""

    def __init__(self, pools: WorkerPools) -> None:
        self._pools = pools
        self._waiting: dict[str, list[_Answer]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def document(self, plan_id: str) -> str | None:
        """Return the canonical JSON of the plan with exactly this id; None where there is none.

        Raises:
            MoetuneError: the database cannot be read.
        """
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(plan_id, []).append(answer)
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        return await answer

    async def _read(self) -> None:
        try:
            while self._waiting:
                ids = list(self._waiting)[:_MAX_BATCH]
                await self._answer({plan_id: self._waiting.pop(plan_id) for plan_id in ids})
        finally:
            self._reader = None

    async def _answer(self, batch: Mapping[str, Sequence[_Answer]]) -> None:
        """Read a batch and answer all requests in it that were not cancelled."""
        found: Mapping[str, str] = {}
        problem: Exception | None = None
        try:
            found = await self._pools.read(self._pools.planner.reading.plan_documents, tuple(batch))
        except Exception as error:  # noqa: BLE001 - it is raised in the waiting requests
            problem = error
        for plan_id, answers in batch.items():
            for answer in answers:
                if answer.done():
                    continue
                if problem is None:
                    answer.set_result(found.get(plan_id))
                else:
                    answer.set_exception(_copy(problem))


def _copy(error: Exception) -> Exception:
    """Return a copy for each waiting request: raising one object twice mixes their tracebacks."""
    return type(error)(*error.args) if isinstance(error, MoetuneError) else error
