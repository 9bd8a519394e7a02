"""What the endpoints share: the desk, the threads that wait for it, and the metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread

from moetune.service.metrics import Metrics
from moetune.workflows.desk import Desk

P = ParamSpec("P")
T = TypeVar("T")
_NUM_READERS = 8
_NUM_SOLVERS = 6
_NUM_WRITERS = 4
_NUM_CHECKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Office:
    """One application's desk, and threads for its calls, which block.

    Each kind of call has threads of its own: a crowd that waits for one new plan does not keep
    known plans, or the health check, waiting.
    """

    desk: Desk
    metrics: Metrics
    readers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_READERS))
    solvers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_SOLVERS))
    writers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_WRITERS))
    checkers: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _NUM_CHECKERS))

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what looks up or parses."""
        return await _run(self.readers, work, *args, **kwargs)

    async def solve(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what may solve for a plan."""
        return await _run(self.solvers, work, *args, **kwargs)

    async def write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what stores rows."""
        return await _run(self.writers, work, *args, **kwargs)

    async def check(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what asks whether the store is there; a wait that is given up ends by itself."""
        return await to_thread.run_sync(
            partial(work, *args, **kwargs), limiter=self.checkers, abandon_on_cancel=True
        )


async def _run(
    limiter: CapacityLimiter, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    return await to_thread.run_sync(partial(work, *args, **kwargs), limiter=limiter)
