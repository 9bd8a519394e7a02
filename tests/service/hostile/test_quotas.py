"""Clients that add without end: quotas of an hour, the store's size, and numbers for both."""

from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.service.problems import QuotaError, StoreFullError
from moetune.service.quotas import QuotaLimits, Quotas
from tests.service.asking import SMALL, batch, served

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def quotas(clock: Clock, **limits: int) -> Quotas:
    return Quotas(limits=QuotaLimits(**limits), store_bytes=lambda: 0, now=clock)


def adds(one: Quotas, client: str, count: int) -> bool:
    try:
        one.take(client, "observations", count)
    except QuotaError:
        return False
    return True


@given(st.lists(st.tuples(st.floats(0, HOUR), st.integers(1, 30)), max_size=40))
def test_no_hour_holds_more_than_twice_the_limit_and_who_waits_may_go_on(
    calls: list[tuple[float, int]],
) -> None:
    clock = Clock()
    mine = quotas(clock, observations=20)
    taken: list[tuple[float, int]] = []
    for pause, count in calls:
        clock.now += pause
        if adds(mine, "10.0.0.1", count):
            taken.append((clock.now, count))
    for at, _ in taken:
        assert sum(count for when, count in taken if at <= when < at + HOUR) <= 2 * 20
    clock.now += HOUR
    assert adds(mine, "10.0.0.1", 20)


def test_a_refusal_says_when_to_come_back_and_then_it_is_true() -> None:
    clock = Clock()
    mine = quotas(clock, observations=3600)
    assert adds(mine, "10.0.0.1", 3600)
    with pytest.raises(QuotaError) as caught:
        mine.take("10.0.0.1", "observations", 100)
    assert caught.value.retry_after_seconds == 100
    clock.now = 99.0
    assert not adds(mine, "10.0.0.1", 100)
    clock.now = 100.0
    assert adds(mine, "10.0.0.1", 100)


def test_clients_and_kinds_have_hours_of_their_own() -> None:
    mine = quotas(Clock(), observations=1, plans=1)
    for client in ("10.0.0.1", "10.0.0.2", "2001:db8:0:1::5", "2001:db8:0:2::5", "fe80::1%eth0"):
        assert adds(mine, client, 1)
        assert not adds(mine, client, 1)
    mine.take("10.0.0.1", "plans")
    # A machine has a whole network of 64 bits, and cannot come from another address of it.
    assert not adds(mine, "2001:db8:0:1::6", 1)


def test_a_million_addresses_take_bounded_memory() -> None:
    mine = quotas(Clock())
    for number in range(12_000):
        assert adds(mine, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1)
    assert len(mine._full_at) == 10_000


def test_a_full_store_takes_nothing() -> None:
    full = Quotas(limits=QuotaLimits(store_bytes=10), store_bytes=lambda: 10)
    with pytest.raises(StoreFullError, match="nothing is added"):
        full.take("10.0.0.1", "plans")
    with pytest.raises(InputError, match="at least 1"):
        QuotaLimits(plans=0)


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_a_service_refuses_what_is_too_much_and_counts_it(tmp_path: Path) -> None:
    limits = ("--plans-per-hour", "1", "--observations-per-hour", "5")
    with served(tmp_path, *limits) as running, httpx.Client(base_url=running.url) as http:
        made = http.post("/v1/plans:resolve", json=SMALL)
        assert made.status_code == 200
        other = http.post("/v1/plans:resolve", json={**SMALL, "model": "gpt-xl"})
        assert other.status_code == 429
        assert 3000 < int(other.headers["Retry-After"]) <= 3600
        assert http.post("/v1/plans:resolve", json=SMALL).status_code == 200  # it is stored
        body = batch(made.json()["id"], {}, {}, {})
        codes = [http.post("/v1/observations", json=body).status_code for _ in range(3)]
        assert codes == [201, 429, 429]
        found = metrics(running.url)
        assert found['moetune_quota_refused_total{kind="plans"}'] == 1
        assert found['moetune_quota_refused_total{kind="observations"}'] == 6
        assert 0 < found["moetune_store_bytes"] < found["moetune_store_limit_bytes"]


def test_a_service_whose_store_is_full_still_answers_what_is_stored(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    with served(tmp_path, db=db) as running:
        assert httpx.post(f"{running.url}/v1/plans:resolve", json=SMALL).status_code == 200
    with served(tmp_path, "--max-store", "64KiB", db=db) as running:
        assert httpx.post(f"{running.url}/v1/plans:resolve", json=SMALL).status_code == 200
        other = httpx.post(f"{running.url}/v1/plans:resolve", json={**SMALL, "model": "gpt-xl"})
        assert other.status_code == 507
        assert "moetune db prune" in other.json()["hint"]
        assert httpx.get(f"{running.url}/readyz").status_code == 200
