"""Solving in processes: answers, errors, deadlines, memory, who hangs up, and equal questions."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

import pytest

from moetune.app.solvers import CALLER, SingleFlight, SolverLimits, SolverPool
from moetune.domain.errors import (
    AbandonedError,
    BusyError,
    InfeasiblePlanError,
    InputError,
    MoetuneError,
    SolveLimitError,
)

NUM_THREADS = 16
ENOUGH = SolverLimits(seconds=240.0, memory_bytes=2**30, num_waiting=2)


def double(number: int) -> int:
    return 2 * number


def fail(what: str) -> None:
    raise InfeasiblePlanError(what, "give it more memory")


def process_id() -> int:
    return os.getpid()


def fill_memory(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def end_badly() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def echo(value: object) -> object:
    return value


@pytest.fixture
def pool() -> Iterator[SolverPool]:
    with closing(SolverPool(ENOUGH, num_processes=1)) as opened:
        yield opened


def test_answers_and_errors_are_those_of_the_function(pool: SolverPool) -> None:
    pool.start()
    assert [pool.run(double, one) for one in (1, 2)] == [2, 4]
    with pytest.raises(InfeasiblePlanError, match="no room") as caught:
        pool.run(fail, "no room")
    assert caught.value.hint == "give it more memory"
    frozen = MappingProxyType({"a": (1, 2)})
    assert pool.run(echo, frozen) == frozen
    assert pool.run(process_id) == pool.run(process_id) != os.getpid()


def test_too_much_memory_is_refused_and_the_next_question_answered(pool: SolverPool) -> None:
    with pytest.raises(SolveLimitError, match="1 GiB"):
        pool.run(fill_memory, 2**32)
    assert pool.run(fill_memory, 2**20) == 2**20


def test_a_process_that_dies_is_replaced(pool: SolverPool) -> None:
    before = pool.run(process_id)
    with pytest.raises(SolveLimitError, match="without an answer"):
        pool.run(end_badly)
    after = pool.run(process_id)
    assert after != before
    os.kill(after, signal.SIGKILL)  # while it waits for a question
    wait_until(lambda: not Path("/proc", str(after)).exists())
    with pytest.raises(SolveLimitError, match="without an answer"):
        pool.run(process_id)
    assert pool.run(process_id) not in {before, after}


def test_an_answer_that_is_late_is_an_error_and_its_process_is_gone() -> None:
    limits = SolverLimits(seconds=1.0, num_waiting=1)
    with closing(SolverPool(limits, num_processes=1)) as pool:
        with pytest.raises(SolveLimitError, match="within the 1 s"):
            pool.run(time.sleep, 600)
        assert not pool._running


def test_questions_beyond_the_places_are_sent_away(pool: SolverPool) -> None:
    pool.start()
    with ThreadPoolExecutor(4) as crowd:
        asked = {crowd.submit(pool.run, time.sleep, 600) for _ in range(4)}
        away, others = wait(asked, return_when=FIRST_COMPLETED)
        (one,) = away
        with pytest.raises(BusyError):
            one.result()
        pool.close()
        for one in others:
            with pytest.raises(AbandonedError, match="ending"):
                one.result()


def test_the_process_of_a_caller_that_hung_up_is_killed(pool: SolverPool) -> None:
    gone = threading.Event()

    class Caller:
        def watch(self) -> Callable[[], bool]:
            return gone.is_set

    def ask() -> None:
        CALLER.set(Caller())
        pool.run(time.sleep, 600)

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask)
        wait_until(lambda: len(pool._running) == 1)
        gone.set()
        with pytest.raises(AbandonedError, match="nobody waits"):
            asked.result()
    assert pool.run(double, 4) == 8


def wait_until(is_so: Callable[[], bool]) -> None:
    for _ in range(2400):
        if is_so():
            return
        time.sleep(0.1)
    raise TimeoutError


class Work:
    """Counts how often it is done, and waits until everybody has asked for it."""

    def __init__(self, flights: SingleFlight[int], error: BaseException | None = None) -> None:
        self.times = 0
        self._solving = flights
        self._error = error
        self._gate = threading.Event()

    def __call__(self) -> int:
        self.times += 1
        assert self._gate.wait(30)
        if self._error is not None:
            raise self._error
        return 42

    def ask_at_once(self) -> list[int | BaseException]:
        def ask() -> int | BaseException:
            try:
                return self._solving.run("key", self)
            except BaseException as error:  # noqa: BLE001 - to be looked at
                return error

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            asked = [pool.submit(ask) for _ in range(NUM_THREADS)]
            while sum(future.running() for future in asked) < NUM_THREADS:
                pass
            threading.Timer(0.1, self._gate.set).start()
            return [future.result(timeout=120) for future in asked]


def test_work_that_is_asked_for_at_once_is_done_once_and_everybody_has_the_result() -> None:
    work = Work(SingleFlight())
    assert work.ask_at_once() == [42] * NUM_THREADS
    assert work.times == 1


def test_an_error_reaches_everybody_and_each_has_its_own() -> None:
    work = Work(SingleFlight(), InfeasiblePlanError("nothing fits", "allow more"))
    errors = work.ask_at_once()
    assert work.times == 1
    assert {(type(one), str(one)) for one in errors} == {
        (InfeasiblePlanError, "nothing fits\n  allow more")
    }
    assert len({id(one) for one in errors}) == NUM_THREADS


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("a defect"), KeyboardInterrupt(), SystemExit()]
)
def test_nobody_is_left_waiting_whatever_ends_the_work(error: BaseException) -> None:
    found = Work(SingleFlight(), error).ask_at_once()
    assert found.count(error) == 1
    waited = [one for one in found if one is not error]
    assert all(type(one) is MoetuneError for one in waited)
    assert all(type(error).__name__ in str(one) for one in waited)


def test_nothing_is_kept_after_the_answer_or_the_error() -> None:
    flights: SingleFlight[int] = SingleFlight()
    numbers = iter(range(10))
    assert [flights.run("key", lambda: next(numbers)) for _ in range(3)] == [0, 1, 2]

    def refuse() -> int:
        raise InputError("no")

    with pytest.raises(InputError):
        flights.run("key", refuse)
    assert flights.run("key", lambda: next(numbers)) == 3


def test_different_keys_do_not_wait_for_each_other() -> None:
    flights: SingleFlight[int] = SingleFlight()
    assert flights.run("outer", lambda: flights.run("inner", lambda: 7)) == 7
