"""Report timed calls to a plan service: in batches, from a thread that training never waits for.

On the group's first rank a `StepReporter` observes some calls of every layer, which a `monitor`
times. The `ObservationSender` sends them through a `ServiceConnection`.
"""

import atexit
import logging
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.operations import OperationTimes
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import MAX_OBSERVATIONS, OBSERVATIONS_SCHEMA, Observation, Settled
from moetune.runtime.plans.monitor import ObservedCall
from moetune.runtime.plans.service import ServiceConnection

OBSERVE_EVERY = 50
"""Calls of a layer between two that are timed."""
CLOSING_SECONDS = 2.0
_ANY = (1.0,)

_LOGGER = logging.getLogger("moetune")


class ObservationSender:
    """Sends observations in batches, from a thread of its own.

    Observations are dropped when the queue is full or the service is away. The log warns the first
    time, and has the number of dropped ones at the end.

    Args:
        send: sends a batch of at most MAX_OBSERVATIONS, the length of the queue; raises if that
            fails.
        interval_seconds: between two batches.
        pause_seconds: after a batch that failed, instead.
        is_quiet: the log has warned already that the service is away.

    Attributes:
        num_sent, num_dropped: observations.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Observation]], None],
        *,
        interval_seconds: float = 5.0,
        pause_seconds: float = 30.0,
        is_quiet: bool = False,
    ) -> None:
        self.num_sent = self.num_dropped = 0
        self._send = send
        self._interval_seconds, self._pause_seconds = interval_seconds, pause_seconds
        self._is_quiet = is_quiet
        self._waiting: queue.SimpleQueue[Observation | None] = queue.SimpleQueue()
        self._closed, self._counts = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, observation: Observation) -> None:
        """Queue an observation, or drop it; return at once."""
        if self._closed.is_set() or self._waiting.qsize() >= MAX_OBSERVATIONS:
            self._drop(1)
            return
        self._waiting.put(observation)
        if self._thread is None:
            self._start()

    def close(self) -> None:
        """Send the queue, for two seconds at most, and accept no more observations."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._waiting.put(None)  # wakes the thread
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join(CLOSING_SECONDS)
        self._drop(len(self._queued()))
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
        while not (self._closed.is_set() and self._waiting.empty()):
            first = self._waiting.get()
            if first is not None:
                self._closed.wait(self._deliver([first, *self._queued()]))

    def _queued(self) -> list[Observation]:
        """Take all observations out of the queue."""
        batch: list[Observation] = []
        with suppress(queue.Empty):
            while True:
                observation = self._waiting.get_nowait()
                batch += [] if observation is None else [observation]
        return batch

    def _drop(self, number: int) -> None:
        with self._counts:
            self.num_dropped += number

    def _deliver(self, batch: list[Observation]) -> float:
        """Send a batch and return the time to wait before the next."""
        try:
            self._send(batch)
        except Exception as error:  # noqa: BLE001 - training goes on whatever happens here
            self._drop(len(batch))
            if not self._is_quiet:
                self._is_quiet = True
                _LOGGER.warning(
                    "observations do not reach the plan service: %s\n"
                    "  training goes on; they are dropped until it takes them again",
                    error,
                )
            return self._pause_seconds
        self.num_sent += len(batch)
        return self._interval_seconds


class StepReporter:
    """Reports measured calls of a book's layers to the plan service, on the first rank.

    Args:
        plan_ids: plans that the service knows; calls of other plans are not reported.
        every: calls of a layer between two that are timed; at least 1.
        device_id: of this machine, see `Fingerprint`.

    Raises:
        InputError: `every` is below 1.
    """

    def __init__(
        self,
        sender: ObservationSender,
        *,
        plan_ids: Collection[str],
        every: int = OBSERVE_EVERY,
        device_id: str = "",
    ) -> None:
        if every < 1:
            raise InputError(f"observe_every must be at least 1, got {every}")
        self.sender, self.plan_ids, self.every = sender, plan_ids, every
        self.device_id = device_id

    def wants(self, plan: Plan, decision: Decision, number: int) -> bool:
        """Want every so many-th call of a plan that the service knows, with the plan's decision."""
        is_planned = decision == plan.decide(plan.tokens_per_rank)
        return number % self.every == 0 and is_planned and plan.id in self.plan_ids

    def take(self, call: ObservedCall) -> None:
        """Send the call, if it was wanted."""
        if self.wants(call.plan, call.decision, call.number):
            self.sender.add(
                _observation(
                    call.plan, call.decision, (call.seconds,), "training", self.device_id,
                    call.operations,
                )
            )  # fmt: skip

    def settled(self, plan: Plan, settled: Settled) -> None:
        """Send what a search measured of its decision, for the plan's own number of tokens.

        Of other numbers of tokens the plan predicts no times.
        """
        if plan.id in self.plan_ids and settled.tokens_per_rank == plan.tokens_per_rank:
            self.sender.add(
                _observation(plan, settled.decision, settled.seconds, "search", self.device_id)
            )

    def close(self) -> None:
        """Send the queue, for two seconds at most."""
        self.sender.close()


def post_observations(connection: ServiceConnection, batch: Sequence[Observation]) -> None:
    """Send a batch.

    Raises:
        ServiceError: the service did not accept it.
    """
    rows = [encode(row) for row in merged(batch)]
    connection.request("/v1/observations", {"schema": OBSERVATIONS_SCHEMA, "observations": rows})


def merged(batch: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return one observation for each plan and decision, with the times of all its calls."""
    groups: dict[Observation, list[Observation]] = {}
    for row in batch:
        kinds = tuple(replace(times, seconds=_ANY) for times in row.operations)
        subject = replace(row, seconds=_ANY, operations=kinds)
        groups.setdefault(subject, []).append(row)
    return tuple(map(_joined, groups.values()))


def _joined(group: Sequence[Observation]) -> Observation:
    first = group[0]
    operations = tuple(
        replace(times, seconds=_chained(row.operations[index].seconds for row in group))
        for index, times in enumerate(first.operations)
    )
    return replace(first, seconds=_chained(row.seconds for row in group), operations=operations)


def _chained(times: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(chain.from_iterable(times))


def _observation(
    plan: Plan,
    decision: Decision,
    seconds: tuple[float, ...],
    source: str,
    device_id: str,
    operations: tuple[OperationTimes, ...] = (),
) -> Observation:
    """Return times of a decision, forward and backward, and the prediction if it is the plan's."""
    planned = plan.decide(plan.tokens_per_rank)
    predicted = plan.predicted.forward_seconds + plan.predicted.backward_seconds
    return Observation(
        plan_id=plan.id,
        forward_degree=decision.forward_degree,
        backward_degree=decision.backward_degree,
        tokens_per_rank=plan.tokens_per_rank,
        predicted_seconds=predicted if decision == planned else 0.0,
        seconds=seconds,
        source=source,
        operations=operations,
        device_id=device_id,
        strategy=None if decision.strategy == planned.strategy else decision.strategy,
    )
