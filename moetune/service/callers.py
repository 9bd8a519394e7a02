"""The client that waits for a request's answer, watched while the answer is made."""

import asyncio
from collections.abc import Callable

from starlette.types import Receive


class RequestCaller:
    """The client of one request, whose body has been read before it is watched."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()

    def watch(self) -> Callable[[], bool]:
        """Return a function that says whether the client has hung up; for any thread.

        The watch ends with the connection or the answer.
        """
        return asyncio.run_coroutine_threadsafe(self._until_gone(), self._loop).done

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
