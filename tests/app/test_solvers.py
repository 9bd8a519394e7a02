"""Solving in processes: answers, errors, deadlines, memory, and who hangs up."""

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

from moetune.app.solvers import CALLER, SolverLimits, SolverPool
from moetune.domain.errors import AbandonedError, BusyError, InfeasiblePlanError, SolveLimitError

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
    assert [pool.run(double, number) for number in (1, 2)] == [2, 4]
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
        with pytest.raises(SolveLimitError, match="within 1 s"):
            pool.run(time.sleep, 600)
        assert not pool._running


def test_questions_beyond_the_places_are_sent_away(pool: SolverPool) -> None:
    pool.start()
    with ThreadPoolExecutor(4) as crowd:
        asked = {crowd.submit(pool.run, time.sleep, 600) for _ in range(4)}
        away, others = wait(asked, return_when=FIRST_COMPLETED)
        (future,) = away
        with pytest.raises(BusyError):
            future.result()
        pool.close()
        for future in others:
            with pytest.raises(AbandonedError, match="ending"):
                future.result()


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
