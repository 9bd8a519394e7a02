"""The peak of live tensor bytes, as torch's own allocator reports them to its profiler."""

import contextlib
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from moetune.runtime.moe import offload


class Live:
    """Filled when the block of `live_tensors` ends.

    Attributes:
        peak_bytes: most bytes alive at once that the block allocated.
        left_bytes: those of them that are still alive.
    """

    peak_bytes = 0
    left_bytes = 0


@contextlib.contextmanager
def live_tensors() -> Iterator[Live]:
    """Watch every allocation of a CPU tensor, temporaries within an operation included.

    Releases of what was allocated before the block are not seen.
    """
    live = Live()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield live
    changes = [
        (event.start_ns(), event.nbytes())
        for event in _recorded(profiler)
        if event.name() == "[memory]"
    ]
    changes.sort(key=lambda change: change[0])
    held = list(itertools.accumulate((num_bytes for _, num_bytes in changes), initial=0))
    live.peak_bytes, live.left_bytes = max(held), held[-1]


class HostMemory:
    """What layers take on the host for activations that leave the device, within a block.

    Attributes:
        num_bytes, peak_bytes: alive now, and most at once.
    """

    num_bytes = peak_bytes = 0

    def __enter__(self) -> Self:
        """Count from now on."""
        self._take = offload.host_memory
        offload.host_memory = self._counted
        return self

    def __exit__(self, *_: object) -> None:
        """Count no more."""
        offload.host_memory = self._take

    def _counted(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        made = self._take(num_bytes, pinned=pinned)
        self.num_bytes += made.nbytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(made.untyped_storage(), self._drop, made.nbytes)
        return made

    def _drop(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


def _recorded(profiler: profile) -> list[Any]:
    inner = profiler.profiler
    if inner is None or inner.kineto_results is None:
        raise RuntimeError("torch's profiler recorded nothing: is another one running?")
    return list(inner.kineto_results.events())
