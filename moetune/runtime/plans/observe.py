"""Tell a plan service what steps really take, beside a training job and never in its way."""

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import chain

from moetune.domain.document import encode
from moetune.domain.records import MAX_OBSERVATIONS, OBSERVATIONS_SCHEMA, Observation
from moetune.runtime.plans.line import ServiceLine

CLOSING_SECONDS = 2.0

_LOGGER = logging.getLogger("moetune")


def post_observations(line: ServiceLine, batch: Sequence[Observation]) -> None:
    """Send a batch.

    Raises:
        ServiceError: it was not taken.
    """
    rows = [encode(one) for one in merged(batch)]
    line.post("/v1/observations", {"schema": OBSERVATIONS_SCHEMA, "observations": rows})


def merged(batch: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return one observation for each plan and decision, with the times of all in their order."""
    alike: dict[tuple[object, ...], list[Observation]] = {}
    for one in batch:
        subject = tuple(getattr(one, item.name) for item in fields(one) if item.name != "seconds")
        alike.setdefault(subject, []).append(one)
    return tuple(
        replace(group[0], seconds=tuple(chain.from_iterable(one.seconds for one in group)))
        for group in alike.values()
    )


class ObservationSender:
    """Sends observations in a thread of its own, in batches.

    What finds no place in the queue, and what the service does not take, is dropped and counted.
    The first time that happens the log says so, and then only how much it was in the end.

    Args:
        send: sends a batch, at most `most_waiting` observations; it raises where it fails.
        interval_seconds: between two batches.
        pause_seconds: the same after one that failed.
        is_quiet: it has been said already that the service is away.

    Attributes:
        num_sent, num_dropped: observations.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Observation]], None],
        *,
        most_waiting: int = MAX_OBSERVATIONS,
        interval_seconds: float = 5.0,
        pause_seconds: float = 30.0,
        is_quiet: bool = False,
    ) -> None:
        self.num_sent = self.num_dropped = 0
        self._send = send
        self._most_waiting = most_waiting
        self._interval_seconds, self._pause_seconds = interval_seconds, pause_seconds
        self._is_quiet = is_quiet
        self._waiting: list[Observation] = []
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, observation: Observation) -> None:
        """Take an observation to send, or drop it; returns at once."""
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._most_waiting:
                self.num_dropped += 1
                return
            self._waiting.append(observation)
            self._changed.notify()
            if self._thread is None:
                self._start()

    def close(self) -> None:
        """Send what waits, for two seconds at most, and take no more."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify()
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join(CLOSING_SECONDS)
        with self._changed:
            self.num_dropped += len(self._waiting)
            self._waiting = []
            if self.num_dropped:
                _LOGGER.info("%d observations sent, %d dropped", self.num_sent, self.num_dropped)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, daemon=True, name="moetune observations")
        try:
            thread.start()
        except RuntimeError:  # no threads left: tried again with the next observation
            return
        self._thread = thread
        atexit.register(self.close)

    def _run(self) -> None:
        while batch := self._take():
            pause_seconds = self._deliver(batch)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, pause_seconds)

    def _take(self) -> list[Observation]:
        """Wait for observations and return all that there are; none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            batch, self._waiting = self._waiting, []
            return batch

    def _deliver(self, batch: list[Observation]) -> float:
        """Send a batch and return how long to wait before the next."""
        try:
            self._send(batch)
        except Exception as error:  # noqa: BLE001 - training goes on whatever happens here
            with self._changed:
                self.num_dropped += len(batch)
            if not self._is_quiet:
                self._is_quiet = True
                _LOGGER.warning(
                    "observations do not reach the plan service: %s\n"
                    "  training goes on; they are dropped until it takes them again",
                    error,
                )
            return self._pause_seconds
        with self._changed:
            self.num_sent += len(batch)
        return self._interval_seconds
