"""Report timed calls to a plan service: in batches, from a thread that training never waits for.

On the group's first rank a `StepReporter` times some calls of every layer, by the timers of
`timers`. The `ObservationSender` sends them through a `ServiceConnection`.
"""

import atexit
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from itertools import chain

import torch

from moetune.domain.constraints import Strategy
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.domain.records import MAX_OBSERVATIONS, OBSERVATIONS_SCHEMA, Observation
from moetune.runtime.plans.service import ServiceConnection
from moetune.runtime.plans.timers import CallWatch, Clock, NoWatch, Watch, device_clock

OBSERVE_EVERY = 50
"""Calls of a layer between two that are timed."""
CLOSING_SECONDS = 2.0

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
        self._waiting: list[Observation] = []
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, observation: Observation) -> None:
        """Queue an observation, or drop it; return at once."""
        with self._changed:
            if self._is_closed or len(self._waiting) >= MAX_OBSERVATIONS:
                self.num_dropped += 1
                return
            self._waiting.append(observation)
            self._changed.notify()
            if self._thread is None:
                self._start()

    def close(self) -> None:
        """Send the queue, for two seconds at most, and accept no more observations."""
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
        """Wait for observations and return all in the queue, none once it is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            batch, self._waiting = self._waiting, []
            return batch

    def _deliver(self, batch: list[Observation]) -> float:
        """Send a batch and return the time to wait before the next."""
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


class StepReporter:
    """Reports measured calls of a book's layers to the plan service, on the first rank.

    Args:
        plan_ids: plans that the service knows; calls of other plans are not reported.
        every: calls of a layer between two that are timed; at least 1.
        clock: of the timers.

    Raises:
        InputError: `every` is below 1.
    """

    def __init__(
        self,
        sender: ObservationSender,
        *,
        plan_ids: Collection[str],
        every: int = OBSERVE_EVERY,
        clock: Clock = device_clock,
    ) -> None:
        if every < 1:
            raise InputError(f"observe_every must be at least 1, got {every}")
        self.sender, self.plan_ids, self.every, self.clock = sender, plan_ids, every, clock
        self._layers: list[LayerReports] = []

    def layer(self, plans: Sequence[Plan], memory_reuse: Strategy | None) -> "LayerReports":
        """Return the reports of one more layer that runs these plans."""
        self._layers.append(LayerReports(self, plans, memory_reuse))
        return self._layers[-1]

    def close(self) -> None:
        """Report the last calls and send the queue, for two seconds at most."""
        for layer in self._layers:
            layer.report()
        self.sender.close()


class LayerReports:
    """Reports of one layer's calls.

    Only calls that a plan predicts are timed: those with its number of tokens and its strategy.

    Args:
        memory_reuse: the strategy that the layer's arguments set, None if they set none.
    """

    def __init__(
        self, reporter: StepReporter, plans: Sequence[Plan], memory_reuse: Strategy | None
    ) -> None:
        self._reporter = reporter
        self._predicted: dict[int, Plan | None] = {}
        for plan in plans:
            is_known = plan.id in reporter.plan_ids
            is_planned = memory_reuse in {None, plan.memory.strategy}
            tokens = plan.tokens_per_rank
            self._predicted.setdefault(tokens, plan if is_known and is_planned else None)
        self._num_calls = 0
        self._timed: tuple[CallWatch, Plan] | None = None

    def watch(self, tokens_per_rank: int, device: torch.device) -> Watch:
        """Return the timer of a call, and report the one timed before if it has ended."""
        plan = self._predicted.get(tokens_per_rank)
        if plan is None:
            return NoWatch()
        self.report()
        self._num_calls += 1
        if self._num_calls % self._reporter.every:
            return NoWatch()

        def note(call: CallWatch) -> None:
            self._timed = call, plan

        return CallWatch(self._reporter.clock, device, tokens_per_rank=tokens_per_rank, note=note)

    def report(self) -> None:
        """Send the timed call, if its backward pass has ended; never wait for it."""
        if self._timed is None or not self._timed[0].is_over():
            return
        (call, plan), self._timed = self._timed, None
        seconds = call.seconds()
        if seconds is not None:
            self._reporter.sender.add(_observation(plan, sum(seconds)))


def post_observations(connection: ServiceConnection, batch: Sequence[Observation]) -> None:
    """Send a batch.

    Raises:
        ServiceError: the service did not accept it.
    """
    rows = [encode(one) for one in merged(batch)]
    connection.post("/v1/observations", {"schema": OBSERVATIONS_SCHEMA, "observations": rows})


def merged(batch: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return one observation for each plan and decision, with the times of all its calls."""
    alike: dict[tuple[object, ...], list[Observation]] = {}
    for one in batch:
        subject = tuple(getattr(one, item.name) for item in fields(one) if item.name != "seconds")
        alike.setdefault(subject, []).append(one)
    return tuple(
        replace(group[0], seconds=tuple(chain.from_iterable(one.seconds for one in group)))
        for group in alike.values()
    )


def _observation(plan: Plan, seconds: float) -> Observation:
    """Return the time of a call's pipelined part, forward and backward, and its prediction."""
    return Observation(
        plan_id=plan.id,
        forward_degree=plan.pipeline.forward_degree,
        backward_degree=plan.pipeline.backward_degree,
        tokens_per_rank=plan.tokens_per_rank,
        predicted_seconds=plan.predicted.forward_seconds + plan.predicted.backward_seconds,
        seconds=(seconds,),
        source="training",
    )
