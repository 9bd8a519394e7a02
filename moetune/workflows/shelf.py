"""Profiles that were read from the store, kept for as long as they are the current ones.

A measured profile has thousands of samples: reading it, and its digest, take longer than a
known plan may.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from moetune.domain.ports import Store
from moetune.workflows.flights import Flights
from moetune.workflows.profiles import FoundProfile, named_profile

MOST_KEPT = 8
_Key = tuple[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileShelf:
    """The profiles of a store, by name. Threads may share it.

    Args:
        store: read only when a profile is asked for that is not, or no longer, here.
    """

    store: Store
    _kept: OrderedDict[_Key, FoundProfile] = field(default_factory=OrderedDict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _flights: Flights[FoundProfile] = field(default_factory=Flights, init=False)

    def find(self, name: str) -> FoundProfile:
        """Return the current profile of that name, its digest worked out.

        Raises:
            ProfileError: nothing has that name.
        """
        key = name, self.store.current_fit(name)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        return self._flights.run(key, lambda: self._read(key))

    def _read(self, key: _Key) -> FoundProfile:
        name, fit = key
        found = named_profile(name, store=self.store)
        _ = found.digest  # worked out now, by one thread
        if self.store.current_fit(name) == fit:  # else it was read beside a change
            with self._lock:
                self._kept[key] = found
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        return found
