"""Batched reads of stored plans, the most frequent request.

Waking a thread and opening and closing a transaction takes longer than the rest of an answer. This
does it once for all requests that have arrived meanwhile; a single request waits for no other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from moetune.domain.errors import MoetuneError

Read: TypeAlias = Callable[[Sequence[str]], Awaitable[Mapping[str, str]]]
_MAX_BATCH = 500
_Answer: TypeAlias = "asyncio.Future[str | None]"


class KnownPlans:
    """Batched reader of plan documents; used from the application's event loop only."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[_Answer]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def document(self, plan_id: str, read: Read) -> str | None:
        """Return the canonical JSON of the plan with exactly this id; None where there is none.

        Args:
            read: reads the documents of several plans.

        Raises:
            MoetuneError: the database cannot be read.
        """
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(plan_id, []).append(answer)
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_all(read))
        return await answer

    async def _read_all(self, read: Read) -> None:
        try:
            while self._waiting:
                ids = list(self._waiting)[:_MAX_BATCH]
                await _answer({plan_id: self._waiting.pop(plan_id) for plan_id in ids}, read)
        finally:
            self._reader = None


async def _answer(batch: Mapping[str, Sequence[_Answer]], read: Read) -> None:
    """Read a batch and answer all requests in it that were not cancelled."""
    documents: Mapping[str, str] = {}
    problem: Exception | None = None
    try:
        documents = await read(tuple(batch))
    except Exception as error:  # noqa: BLE001 - it is raised in the waiting requests
        problem = error
    for plan_id, answers in batch.items():
        for answer in answers:
            if answer.done():
                continue
            if problem is None:
                answer.set_result(documents.get(plan_id))
            else:
                answer.set_exception(_copy(problem))


def _copy(error: Exception) -> Exception:
    """Return a copy for each waiting request: raising one object twice mixes their tracebacks."""
    return type(error)(*error.args) if isinstance(error, MoetuneError) else error
