"""Observations on their way to the service: never in the way, in batches, dropped and counted."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

from moetune.domain.document import encode
from moetune.domain.records import Observation
from moetune.runtime.plans import reports as reporting
from moetune.runtime.plans.reports import ObservationSender, merged, post_observations
from moetune.runtime.plans.service import ServiceConnection
from tests.runtime.stub_service import serving

ONE = Observation(
    plan_id="3f9c21", forward_degree=4, backward_degree=4, tokens_per_rank=40,
    predicted_seconds=2.0, seconds=(2.5,), source="training",
)  # fmt: skip
LATEST_SECONDS = 120


def numbered(number: int) -> Observation:
    return replace(ONE, seconds=(float(number),))


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LATEST_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.005)


def has_dropped(sender: ObservationSender, number: int) -> bool:
    return sender.num_dropped == number


class Receiver:
    """Takes batches; while `holds` is set it keeps the thread that sends one."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Observation]] = []
        self.is_away = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.num_begun = 0

    def __call__(self, batch: Sequence[Observation]) -> None:
        self.num_begun += 1
        assert self.goes_on.wait(LATEST_SECONDS)
        if self.is_away:
            raise OSError("connection refused")
        self.batches.append(batch)

    @property
    def taken(self) -> list[Observation]:
        return [one for batch in self.batches for one in batch]


@contextmanager
def sender_to(receiver: Receiver, *, is_quiet: bool = False) -> Iterator[ObservationSender]:
    sender = ObservationSender(
        receiver, interval_seconds=0.01, pause_seconds=0.02, is_quiet=is_quiet
    )
    yield sender
    receiver.goes_on.set()
    sender.close()


def test_a_batch_is_one_document_with_the_times_of_each_plan_and_decision_together() -> None:
    other = replace(ONE, plan_id="77ab")
    with serving(lambda exchange, _: exchange.reply(202)) as stub:
        connection = ServiceConnection(stub.url, "write-7f3a")
        sender = ObservationSender(partial(post_observations, connection))
        sender.add(ONE)
        sender.close()
        post_observations(connection, [numbered(3), other, numbered(1), numbered(2)])
    first, second = stub.documents("/v1/observations")
    assert first == {"schema": "moetune.observations/1", "observations": [encode(ONE)]}
    assert second["observations"] == [
        encode(replace(ONE, seconds=(3.0, 1.0, 2.0))), encode(other)
    ]  # fmt: skip
    assert stub.seen[0].headers["Authorization"] == "Bearer write-7f3a"


def test_merging_keeps_apart_what_differs_in_anything_but_time() -> None:
    several = [replace(ONE, forward_degree=2), replace(ONE, tokens_per_rank=80), ONE]
    assert merged([*several, *several]) == tuple(
        replace(one, seconds=(2.5, 2.5)) for one in several
    )


def test_all_arrive_in_their_order() -> None:
    receiver = Receiver()
    with sender_to(receiver) as sender:
        for number in range(100):
            sender.add(numbered(number))
    assert receiver.taken == [numbered(number) for number in range(100)]
    assert (sender.num_sent, sender.num_dropped) == (100, 0)


def test_adding_never_waits_for_a_service_that_hangs_and_the_rest_is_counted() -> None:
    receiver = Receiver()
    receiver.goes_on.clear()
    with sender_to(receiver) as sender:
        sender.add(numbered(0))
        eventually(lambda: receiver.num_begun == 1)
        for number in range(1, 1501):
            sender.add(numbered(number))
        assert (receiver.num_begun, sender.num_dropped) == (1, 500)
    assert receiver.taken == [numbered(number) for number in range(1001)]
    assert sender.num_sent == 1001


def test_closing_waits_only_so_long_for_a_service_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporting, "CLOSING_SECONDS", 0.05)
    receiver = Receiver()
    receiver.goes_on.clear()
    with sender_to(receiver) as sender, caplog.at_level(logging.INFO):
        sender.add(ONE)
        eventually(lambda: receiver.num_begun == 1)
        sender.add(ONE)
        sender.close()
        assert receiver.batches == []
        assert sender.num_dropped == 1
        assert "0 observations sent, 1 dropped" in caplog.text
        sender.add(ONE)
        assert sender.num_dropped == 2


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_service_that_goes_away_is_one_warning_and_one_that_comes_back_is_sent_to(
    caplog: pytest.LogCaptureFixture, *, is_quiet: bool
) -> None:
    receiver = Receiver()
    receiver.is_away = True
    with sender_to(receiver, is_quiet=is_quiet) as sender:
        for number in range(3):
            sender.add(numbered(number))
            eventually(partial(has_dropped, sender, number + 1))
        receiver.is_away = False
        sender.add(numbered(3))
        eventually(lambda: sender.num_sent == 1)
    assert receiver.taken == [numbered(3)]
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert ["connection refused" in text for text in warnings] == [True] * (not is_quiet)


def test_a_thread_that_cannot_be_had_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    receiver = Receiver()
    with sender_to(receiver) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            sender.add(numbered(0))
        sender.add(numbered(1))
    assert receiver.taken == [numbered(0), numbered(1)]
