"""What torch keeps for each thread, handed from a thread to another that works for it.

A new thread has neither its starter's autocast, nor its current GPU and streams. Work of both is in
one order only where the streams are the same.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadState:
    """The state of one thread.

    Args:
        streams: the current stream of each GPU that is used.
        gpu: the current GPU; None where none is used.
        autocasts: kinds of devices with autocast, and its dtype.
        keeps_casts: autocast casts each weight once.
    """

    streams: tuple[torch.cuda.Stream, ...]
    gpu: int | None
    autocasts: tuple[tuple[str, torch.dtype], ...]
    keeps_casts: bool

    @classmethod
    def of_this_thread(cls, devices: Iterable[torch.device]) -> "ThreadState":
        """Return that of the calling thread.

        Args:
            devices: on which there will be work.
        """
        gpus = sorted({each for each in devices if each.type == "cuda"}, key=str)
        return cls(
            streams=tuple(torch.cuda.current_stream(each) for each in gpus),
            gpu=torch.cuda.current_device() if gpus else None,
            autocasts=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in _KINDS
                if torch.is_autocast_enabled(kind)
            ),
            keeps_casts=torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def on_streams(self) -> Iterator[None]:
        """Run the body, perhaps in another thread, on the same GPU and streams."""
        with contextlib.ExitStack() as stack:
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            if self.gpu is not None:
                stack.enter_context(torch.cuda.device(self.gpu))
            yield

    @contextlib.contextmanager
    def autocast(self, *, is_on: bool) -> Iterator[None]:
        """Run the body, perhaps in another thread, with the same autocast, or with none."""
        with contextlib.ExitStack() as stack:
            for kind, dtype in self.autocasts:
                cast = torch.autocast(kind, dtype, enabled=is_on, cache_enabled=self.keeps_casts)
                stack.enter_context(cast)
            yield
