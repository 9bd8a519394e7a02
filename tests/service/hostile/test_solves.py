"""Big questions to a real service: they end, and stop neither others nor the service's end."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.asking import SMALL, Served, served

LONG = 240.0


def big(number: int = 0) -> dict[str, Any]:
    """A what-if of a model of 1,024 layers on 16,384 ranks; each number is another one."""
    inputs = {"num_layers": 1024 - number, "num_heads": 64, "seq": 2048, "vocab": 51200,
              "d_model": 4096, "d_hidden": 16384, "num_experts": 64, "top_k": 2,
              "profile": "v100-x256", "world_size": 2**14, "global_batch": 2**20}  # fmt: skip
    return {"inputs": inputs, "changes": {"memory_limit_bytes": 2**35}}


def code_of(answer: httpx.Response) -> tuple[int, str]:
    """Status and title of an answer that is a problem."""
    return answer.status_code, answer.json()["title"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service that solves no question for longer than six seconds."""
    with served(tmp_path_factory.mktemp("hostile"), "--deadline", "6s") as running:
        yield running


def small_question(client: httpx.Client, tokens: int) -> httpx.Response:
    plan_id = client.post("/v1/plans:resolve", json=SMALL).json()["id"]
    body = {"plan_id": plan_id, "changes": {"tokens_per_rank": tokens}}
    return client.post("/v1/whatif", json=body)


def test_big_questions_end_and_stop_neither_small_questions_nor_stored_plans(
    service: Served,
) -> None:
    with (
        httpx.Client(base_url=service.url, timeout=LONG) as client,
        ThreadPoolExecutor(2) as others,
    ):
        stored = client.post("/v1/plans:resolve", json=SMALL).json()["id"]
        asked = [
            others.submit(httpx.post, f"{service.url}/v1/whatif", json=big(number), timeout=LONG)
            for number in range(2)
        ]
        assert small_question(client, 3000).status_code == 200
        assert client.get(f"/v1/plans/{stored}").status_code == 200
        assert client.post("/v1/plans:resolve", json=SMALL).json()["id"] == stored
        assert not any(future.done() for future in asked)
        for answer in (future.result() for future in asked):
            assert code_of(answer) == (504, "answer takes too long")
            assert "within 6 s" in answer.json()["detail"]
        assert small_question(client, 3001).status_code == 200


def test_more_big_questions_than_places_are_sent_away_at_once(service: Served) -> None:
    with (
        ThreadPoolExecutor(40) as crowd,
        httpx.Client(base_url=service.url, timeout=LONG) as client,
    ):
        plan_id = client.post("/v1/plans:resolve", json=SMALL).json()["id"]
        pages = [
            crowd.submit(httpx.post, f"{service.url}/v1/whatif", json=big(number), timeout=LONG)
            for number in range(40)
        ]
        assert client.get("/healthz").status_code == 200
        assert client.get(f"/v1/plans/{plan_id}").status_code == 200
        answers = [page.result() for page in pages]
    assert {code_of(answer) for answer in answers} == {
        (504, "answer takes too long"), (429, "too many questions"),
    }  # fmt: skip
    sent_away = [answer for answer in answers if answer.status_code == 429]
    assert len(sent_away) >= 20
    assert all(int(answer.headers["retry-after"]) > 0 for answer in sent_away)


def test_who_hangs_up_ends_the_solve(tmp_path: Path) -> None:
    with served(tmp_path, "--deadline", "10m") as patient:
        hang_up_on(patient, json.dumps(big()).encode(), times=4)
        # All processes were busy, for ten minutes each.
        with httpx.Client(base_url=patient.url, timeout=LONG) as client:
            assert small_question(client, 3002).status_code == 200


def hang_up_on(service: Served, body: bytes, *, times: int) -> None:
    url = httpx.URL(service.url)
    head = (
        f"POST /v1/whatif HTTP/1.1\r\nHost: {url.host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    callers = []
    for _ in range(times):
        caller = socket.create_connection((url.host, url.port or 80))
        caller.sendall(head.encode() + body)
        callers.append(caller)
    time.sleep(2.0)
    for caller in callers:
        caller.close()


def test_pages_of_other_sites_have_nothing_computed(service: Served) -> None:
    with httpx.Client(base_url=service.url, timeout=LONG) as client:
        plan_id = client.post("/v1/plans:resolve", json=SMALL).json()["id"]
        foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        for path in (
            "/new?model=gpt-s",
            f"/v1/plans/{plan_id}/trace", f"/plans/{plan_id}", "/compare",
        ):  # fmt: skip
            assert client.get(path, headers=foreign).status_code == 403, path
        followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate",
                    "Sec-Fetch-Dest": "document", "Sec-Fetch-User": "?1"}  # fmt: skip
        assert client.get(f"/plans/{plan_id}", headers=followed).status_code == 200
        assert client.get("/healthz", headers=foreign).status_code == 200


def test_sigterm_ends_the_service_whatever_is_solved(tmp_path: Path) -> None:
    with served(tmp_path, "--deadline", "10m") as running, ThreadPoolExecutor(8) as crowd:
        ask = f"{running.url}/v1/plans:resolve"
        plan_id = httpx.post(ask, json=SMALL, timeout=LONG).json()["id"]
        for number in range(6):
            crowd.submit(httpx.post, f"{running.url}/v1/whatif", json=big(number), timeout=LONG)
        crowd.submit(httpx.post, ask, json=big()["inputs"], timeout=LONG)
        address = f"{running.url}/plans/{plan_id}"
        crowd.submit(httpx.get, address, timeout=LONG)
        time.sleep(1.5)
        started = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=LONG) == 0
        assert time.monotonic() - started < 30
