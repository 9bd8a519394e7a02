"""Operands that take turns, so that a device's cache holds none of the run before.

A layer's weights and rows come from memory: between two uses of a matrix a whole model runs. A
block that repeats one operation on the same tensors finds up to the cache's size of them there.
"""

from collections.abc import Callable
from itertools import cycle

from moetune.measure.device import Device

_CACHES = 2
_MOST_SETS = 64


def num_sets(num_bytes: int, device: Device) -> int:
    """Return how many sets of tensors fill the device's cache twice: 1 if one does, or no cache.

    Args:
        num_bytes: of one set.
    """
    return min(max(-(-_CACHES * device.cache_bytes // max(num_bytes, 1)), 1), _MOST_SETS)


def in_turns(
    make: Callable[[], Callable[[], None]], *, num_bytes: int, device: Device
) -> Callable[[], None]:
    """Return a function that runs an operation on the next set of tensors each time.

    Args:
        make: allocates a set and returns the function that runs on it.
        num_bytes: of one set.
    """
    runs = cycle([make() for _ in range(num_sets(num_bytes, device))])

    def run() -> None:
        next(runs)()

    return run
