"""A link of one rank whose exchanges take a set time, one after another, in a thread."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moetune.runtime.links import LocalLink, Transfer


class _SlowTransfer:
    def __init__(self, work: "Future[None]") -> None:
        self._done: torch.futures.Future[object] = torch.futures.Future()
        self._event = threading.Event()
        work.add_done_callback(self._end)

    def _end(self, _: "Future[None]") -> None:
        self._event.set()
        self._done.set_result(None)

    def wait(self) -> None:
        self._event.wait()

    def future(self) -> torch.futures.Future[object]:
        return self._done


class SlowLink(LocalLink):
    """A wire that really takes time and needs no processor meanwhile."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._wire = ThreadPoolExecutor(max_workers=1)

    def exchange(
        self, output: torch.Tensor, rows: torch.Tensor, *_: object, **__: object
    ) -> Transfer:
        def travel() -> None:
            time.sleep(self._seconds)
            output.copy_(rows)

        return _SlowTransfer(self._wire.submit(travel))
