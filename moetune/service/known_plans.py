"""Stored plans by id: all that are asked for at one time are read together.

To wake a thread, begin a transaction and end it takes longer than all the rest of an answer. Under
load that is done once for dozens of requests, and a lone request waits for nobody.
"""

import asyncio
from collections.abc import Mapping

from moetune.domain.errors import MoetuneError
from moetune.service.office import Office

_MAX_BATCH = 500


class KnownPlans:
    """Reads plan documents for one application; used from its event loop only."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._asked: dict[str, asyncio.Future[str | None]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def document(self, plan_id: str) -> str | None:
        """Return the canonical JSON of the plan with exactly this id, None where there is none.

        Raises:
            MoetuneError: the database cannot be read.
        """
        answer = self._asked.get(plan_id)
        if answer is None:
            answer = self._asked[plan_id] = asyncio.get_running_loop().create_future()
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
        # Others wait for the same answer: who goes away must not take it along.
        return await asyncio.shield(answer)

    async def _read(self) -> None:
        try:
            while self._asked:
                ids = list(self._asked)[:_MAX_BATCH]
                batch = {plan_id: self._asked.pop(plan_id) for plan_id in ids}
                await self._answer(batch)
        finally:
            self._reader = None

    async def _answer(self, batch: Mapping[str, "asyncio.Future[str | None]"]) -> None:
        try:
            found = await self._office.read(self._office.desk.reading.plan_documents, tuple(batch))
        except Exception as error:  # noqa: BLE001 - it is raised where the plans are waited for
            for answer in batch.values():
                answer.set_exception(_own(error))
        else:
            for plan_id, answer in batch.items():
                answer.set_result(found.get(plan_id))


def _own(error: Exception) -> Exception:
    """Return an error of its own for each who waits: raising one twice spoils its traceback."""
    return type(error)(*error.args) if isinstance(error, MoetuneError) else error
