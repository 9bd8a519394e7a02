"""Start all-reduces behind earlier exchanges: on a CPU by a thread, on a GPU by a stream.

An exchange that experts wait for has priority over gradients, which nothing waits for before the
end of the backward pass: a piece does not start while the last exchange before it is under way.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from moetune.comm.group import Communicator
from moetune.comm.transfer import Transfer

_NAME = "the mean of dense gradients"


class Sender(Protocol):
    """Averages parts of buffers, in the order in which they are given."""

    def start(self, parts: list[torch.Tensor], behind: Transfer | None) -> None:
        """Average parts over the ranks, in place, once the transfer before them has ended."""

    def finish(self) -> None:
        """Wait for all parts.

        Raises:
            CollectiveError: an all-reduce failed.
        """


class ThreadSender:
    """Sends CPU tensors: a thread waits, so that the caller computes on."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moetune gradients")
        self._issued: list[Future[list[Transfer]]] = []

    def start(self, parts: list[torch.Tensor], behind: Transfer | None) -> None:
        """Issue the parts' all-reduces in the thread."""
        before = None if behind is None else behind.future()
        self._issued.append(self._thread.submit(self._issue, parts, before))

    def finish(self) -> None:
        """Wait for the thread, and for what it has issued."""
        issued, self._issued = self._issued, []
        for future in issued:
            for transfer in future.result():
                transfer.wait()

    def _issue(
        self, parts: list[torch.Tensor], before: "torch.futures.Future[object] | None"
    ) -> list[Transfer]:
        if before is not None:
            before.wait()
        return _started(parts, self._communicator)


class StreamSender:
    """Sends a GPU's tensors: a stream waits, and the host goes on."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._communicator, self._device = communicator, device
        self._stream = torch.cuda.Stream(device)
        self._issued: list[Transfer] = []

    def start(self, parts: list[torch.Tensor], behind: Transfer | None) -> None:
        """Issue the parts' all-reduces behind the transfer and what the device computes."""
        before = None if behind is None else behind.future()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if before is not None:
                before.wait()
            self._issued += _started(parts, self._communicator)

    def finish(self) -> None:
        """Order the current stream behind all parts."""
        issued, self._issued = self._issued, []
        for transfer in issued:
            transfer.wait()


def sender_of(communicator: Communicator, device: torch.device) -> Sender:
    """Return a sender for tensors of a device."""
    if device.type == "cuda":
        return StreamSender(communicator, device)
    return ThreadSender(communicator)


def _started(parts: list[torch.Tensor], communicator: Communicator) -> list[Transfer]:
    for part in parts:
        part.div_(communicator.num_ranks)  # before the sum, which narrow dtypes may not hold
    return [communicator.all_reduce(part, _NAME) for part in parts]
