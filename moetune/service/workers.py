"""Worker threads for the planner's blocking calls."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeAlias, TypeVar

from anyio import CapacityLimiter, to_thread

from moetune.app.planner import ServicePlanner
from moetune.domain.errors import MoetuneError
from moetune.service.metrics import Metrics

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Threads for a kind of blocking calls.

    Args:
        number: number of calls that run at once.
        abandons: whether a cancelled wait leaves its thread to run to the end.
    """

    def __init__(self, number: int, *, abandons: bool = False) -> None:
        self._limiter = CapacityLimiter(number)
        self._abandons = abandons

    async def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work in a thread and return its result."""
        call = partial(work, *args, **kwargs)
        return await to_thread.run_sync(
            call, limiter=self._limiter, abandon_on_cancel=self._abandons
        )


Documents: TypeAlias = Mapping[str, str]
Read: TypeAlias = Callable[[Sequence[str]], Awaitable[Documents]]


class KnownPlans:
    """Batched reader of plan documents; used from the application's event loop only.

    Waking a thread and opening and closing a transaction takes longer than the rest of an answer.
    This does it once for all requests that arrive during the previous read. A single request does
    not wait.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._ids: set[str] = set()
        self._next: asyncio.Task[Documents] | None = None

    async def document(self, plan_id: str, read: Read) -> str | None:
        """Return the canonical JSON of the plan with exactly this id; None if there is none.

        Args:
            read: reads the documents of several plans.

        Raises:
            MoetuneError: the database cannot be read.
        """
        self._ids.add(plan_id)
        if self._next is None:
            self._next = asyncio.create_task(self._read(read))
        try:
            # A client that hangs up must not cancel the others' answer.
            documents = await asyncio.shield(self._next)
        except MoetuneError as error:
            # A copy for each request: raising an object twice mixes their tracebacks.
            raise type(error)(*error.args) from None
        return documents.get(plan_id)

    async def _read(self, read: Read) -> Documents:
        """Read all documents that are asked for until the previous read has ended."""
        async with self._turn:
            ids, self._ids, self._next = tuple(self._ids), set(), None
            return await read(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPools:
    """An application's planner, and threads for its blocking calls.

    Each kind of call has separate threads. Requests that wait for new plans then do not delay
    those for stored plans, or the health check.

    Args:
        read: look-ups, and the parsing of bodies.
        solve: calls that may solve for a plan; they wait for the solving processes, and for plans
            that another request solves.
        write: calls that store rows.
        check: checks of the store.
    """

    planner: ServicePlanner
    metrics: Metrics
    read: Threads = field(default_factory=partial(Threads, 8))
    solve: Threads = field(default_factory=partial(Threads, 40))
    write: Threads = field(default_factory=partial(Threads, 4))
    check: Threads = field(default_factory=partial(Threads, 2, abandons=True))
    known_plans: KnownPlans = field(default_factory=KnownPlans)

    async def plan_document(self, plan_id: str) -> str | None:
        """Return the JSON of the plan with exactly this id; None if there is none."""

        async def read(plan_ids: Sequence[str]) -> Mapping[str, str]:
            return await self.read(self.planner.reading.plan_documents, plan_ids)

        return await self.known_plans.document(plan_id, read)
