"""Links whose exchanges take a set time at least, one after another, in a thread."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist

from moetune.comm.group import OneRank, Transfer
from moetune.comm.process_group import GroupCommunicator


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


class SlowLink(OneRank):
    """A wire that really takes time and needs no processor meanwhile."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._wire = ThreadPoolExecutor(max_workers=1)

    def all_to_all(
        self, output: torch.Tensor, rows: torch.Tensor, *_: object, **__: object
    ) -> Transfer:
        def travel() -> None:
            time.sleep(self._seconds)
            output.copy_(rows)

        return _SlowTransfer(self._wire.submit(travel))

    def all_reduce(self, values: torch.Tensor, *names: object, **_: object) -> Transfer:
        assert values.is_contiguous(), names
        return _SlowTransfer(self._wire.submit(time.sleep, self._seconds))


class SlowGroupLink(GroupCommunicator):
    """Real ranks behind such a wire: rows arrive, and that late on any machine."""

    def __init__(self, seconds: float) -> None:
        super().__init__(None)
        self._seconds = seconds
        self._wire = ThreadPoolExecutor(max_workers=1)

    def all_to_all(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        *_: object,
        **__: object,
    ) -> Transfer:
        def travel() -> None:
            time.sleep(self._seconds)
            dist.all_to_all_single(
                output, rows, list(output_splits or ()), list(input_splits or ())
            )

        return _SlowTransfer(self._wire.submit(travel))
