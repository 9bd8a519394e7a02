"""Worker threads for the planner's blocking calls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread

from moetune.app.planner import ServicePlanner
from moetune.service.metrics import Metrics

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Threads for one kind of blocking calls.

    Args:
        number: of calls that run at once.
        abandons: whether a thread goes on to its end when the wait for it is cancelled.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPools:
    """One application's planner, and threads for its blocking calls.

    Each kind of call has its own threads, so that requests that wait for new plans do not delay
    those for stored plans, or the health check.

    Args:
        read: look-ups, and the parsing of bodies.
        solve: what may solve for a plan; they wait for the processes that solve, and for plans
            that another request solves.
        write: what stores rows.
        check: checks of the store.
    """

    planner: ServicePlanner
    metrics: Metrics
    read: Threads = field(default_factory=partial(Threads, 8))
    solve: Threads = field(default_factory=partial(Threads, 40))
    write: Threads = field(default_factory=partial(Threads, 4))
    check: Threads = field(default_factory=partial(Threads, 2, abandons=True))
