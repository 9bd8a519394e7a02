"""Transfers beside the computation: on a stream of their own where the device is a GPU."""

from collections.abc import Callable

import torch

Wait = Callable[[], None]
"""Makes what comes next wait for a transfer."""


class SideStream:
    """Where transfers of one direction run, one after another.

    On a CPU nothing runs by itself: transfers take the caller's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, transfer: Callable[[], Wait | None]) -> Wait:
        """Begin a transfer behind everything that the current stream has been given.

        Args:
            transfer: may itself return a wait, which is then the current stream's to make.
        """
        if self._stream is None:
            return transfer() or _nothing
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            wait = transfer()
        done = self._stream.record_event()

        def join() -> None:
            if wait is not None:
                wait()
            torch.cuda.current_stream().wait_event(done)

        return join

    def run_late(self, transfer: Callable[[], None]) -> Wait:
        """As `run`, of what a CPU should begin only when somebody waits for it."""
        return transfer if self._stream is None else self.run(transfer)

    def synchronize(self) -> None:
        """Let the host wait for everything on the stream."""
        if self._stream is not None:
            self._stream.synchronize()


def _nothing() -> None:
    """Wait for nothing."""
