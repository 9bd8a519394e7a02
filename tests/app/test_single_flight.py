"""Work that is asked for at once is done once, and its result or error reaches all."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from moetune.app.solvers import SingleFlight
from moetune.domain.errors import InfeasiblePlanError, InputError, MoetuneError

NUM_THREADS = 16


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
            while sum(one.running() for one in asked) < NUM_THREADS:
                pass
            threading.Timer(0.1, self._gate.set).start()
            return [one.result(timeout=120) for one in asked]


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

    def fail() -> int:
        raise InputError("no")

    with pytest.raises(InputError):
        flights.run("key", fail)
    assert flights.run("key", lambda: next(numbers)) == 3


def test_different_keys_do_not_wait_for_each_other() -> None:
    flights: SingleFlight[int] = SingleFlight()
    assert flights.run("outer", lambda: flights.run("inner", lambda: 7)) == 7
