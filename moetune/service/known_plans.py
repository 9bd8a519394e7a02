"""Batched reads of stored plans, the most frequent request.

Waking a thread and opening and closing a transaction takes longer than the rest of an answer. This
does it once for all requests that have arrived meanwhile; a single request waits for no other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from moetune.domain.errors import MoetuneError

Documents: TypeAlias = Mapping[str, str]
Read: TypeAlias = Callable[[Sequence[str]], Awaitable[Documents]]


class KnownPlans:
    """Batched reader of plan documents; used from the application's event loop only."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._ids: set[str] = set()
        self._next: asyncio.Task[Documents] | None = None

    async def document(self, plan_id: str, read: Read) -> str | None:
        """Return the canonical JSON of the plan with exactly this id; None where there is none.

        Args:
            read: reads the documents of several plans.

        Raises:
            MoetuneError: the database cannot be read.
        """
        self._ids.add(plan_id)
        if self._next is None:
            self._next = asyncio.create_task(self._read(read))
        try:
            # Who hangs up must not take the answer of others along.
            documents = await asyncio.shield(self._next)
        except MoetuneError as error:
            # A copy for each request: raising one object twice mixes their tracebacks.
            raise type(error)(*error.args) from None
        return documents.get(plan_id)

    async def _read(self, read: Read) -> Documents:
        """Read what is asked for until the read before has ended."""
        async with self._turn:
            ids, self._ids, self._next = tuple(self._ids), set(), None
            return await read(ids)
