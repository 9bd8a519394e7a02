"""Copies between device and host, beside computation and communication.

On a CPU both are the same memory and a copy is made at once; on CUDA each direction has a
stream of its own.
"""

from typing import Protocol

import torch


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Order the current stream (on a CPU: the caller) behind the end of the copy."""
        ...


class Copies(Protocol):
    """Starts copies in the order of issue, one stream each way."""

    def save(self, rows: torch.Tensor, host: torch.Tensor) -> Copy:
        """Start a copy to the host, behind what the current stream has been given so far."""
        ...

    def load(self, host: torch.Tensor, rows: torch.Tensor) -> Copy:
        """Start a copy to the device, behind what the current stream has been given so far."""
        ...


class _Done:
    def wait(self) -> None:
        """Return at once."""


class HostCopies:
    """Copies within host memory."""

    def save(self, rows: torch.Tensor, host: torch.Tensor) -> Copy:
        """Copy."""
        host.copy_(rows)
        return _Done()

    def load(self, host: torch.Tensor, rows: torch.Tensor) -> Copy:
        """Copy."""
        rows.copy_(host)
        return _Done()


class _OnStream:
    def __init__(self, stream: torch.cuda.Stream, tensors: tuple[torch.Tensor, ...]) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)
        # Kept until the copy is waited for, so that the allocator hands them out no earlier.
        self._tensors: tuple[torch.Tensor, ...] = tensors

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = ()


class CudaCopies:
    """Copies on two streams."""

    def __init__(self, device: torch.device) -> None:
        self._to_host = torch.cuda.Stream(device)
        self._to_device = torch.cuda.Stream(device)

    def save(self, rows: torch.Tensor, host: torch.Tensor) -> Copy:
        """Start the copy."""
        return self._start(self._to_host, rows, host)

    def load(self, host: torch.Tensor, rows: torch.Tensor) -> Copy:
        """Start the copy."""
        return self._start(self._to_device, host, rows)

    @staticmethod
    def _start(stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor) -> Copy:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return _OnStream(stream, (source, target))


def copies_of(device: torch.device) -> Copies:
    """Return what copies to and from that device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()
