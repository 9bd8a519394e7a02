"""How fast `moetune serve` answers: known plans, one new plan for many, its start.

    python -m benchmarks.service

The service is a process of its own with 10,000 stored plans; this process is the load. On two
cores each has one, and shares it with what the kernel does for both.
"""

import asyncio
import json
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.service.connection import Connection, Latencies, get, load, together
from moetune.app.files import bundled_profiles, load_profile_file, write_text
from moetune.app.plan import PlanRequest, make_plan
from moetune.domain.plan import Plan
from moetune.domain.records import Observation
from moetune.domain.units import format_seconds
from moetune.store import open_store

_RESULT = Path(__file__).parents[2] / "docs/results/service.md"
_PROFILE = "rtx2080ti-x64"
_NUM_PLANS = 10_000
_NUM_OBSERVATIONS = 10_000
_NUM_CONNECTIONS = 32
_NUM_RANKS = 256
_OFFERED_PER_SECOND = 1000
_LOAD_SECONDS = 15.0
_NUM_STARTS = 5
_Row = tuple[str, str, str]


def main() -> None:
    """Measure, print and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "moetune.db"
        ids = _fill(db)
        rows = [("start to ready, median of 5", "2 s", _start_seconds(db))]
        with served(db) as url:
            rows += asyncio.run(_known_plans(url, ids))
            rows += asyncio.run(_one_new_plan(url))
            rows += asyncio.run(_observed(url))
    lines = [
        "# Speed of the service",
        "",
        f"Python {platform.python_version()}, on two cores of this kind: {_cpu()}.",
        f"One process serves on loopback from SQLite with {_NUM_PLANS:,} plans and",
        f"{_NUM_OBSERVATIONS:,} observations; the load comes from another on the same two cores.",
        "",
        "| what | target | measured |",
        "|---|---:|---:|",
        *(f"| {what} | {target} | {measured} |" for what, target, measured in rows),
        "",
        "A late answer's time counts from when it was due.",
    ]
    report = "\n".join(lines) + "\n"
    print(report)
    write_text(_RESULT, report)


def _fill(db: Path) -> list[str]:
    """Store the plans and observations, and return the plans' ids."""
    profile = load_profile_file(bundled_profiles()[_PROFILE])
    plan = make_plan(PlanRequest(model="gpt-s"), profile=profile)
    plans = [_for_tokens(plan, 1 + number) for number in range(_NUM_PLANS)]
    with open_store(str(db)) as store:
        store.save_profile(profile)
        for one in plans:
            store.save_plan(one)
        rows = [_observation(plans[number % 100], number) for number in range(_NUM_OBSERVATIONS)]
        for first in range(0, len(rows), 1000):
            store.add_observations(rows[first : first + 1000])
    return [one.id for one in plans]


def _for_tokens(plan: Plan, tokens: int) -> Plan:
    inputs = replace(plan.inputs, tokens_per_rank=tokens)
    return replace(plan, inputs=inputs, id=inputs.plan_id)


def _observation(plan: Plan, number: int) -> Observation:
    predicted = plan.predicted.forward_seconds + plan.predicted.backward_seconds
    return Observation(
        plan_id=plan.id,
        forward_degree=plan.pipeline.forward_degree,
        backward_degree=plan.pipeline.backward_degree,
        tokens_per_rank=plan.inputs.tokens_per_rank,
        predicted_seconds=predicted,
        seconds=tuple(predicted * (1 + (number + step) % 7 / 50) for step in range(10)),
        source="training",
    )


@contextmanager
def served(db: Path) -> Iterator[str]:
    """Run the service, quietly, until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moetune", "--no-config", "--db", str(db), "serve", "--port", "0",
         "--log-format", "json", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None  # noqa: S101 - asked for
    try:
        yield _ready_url(process.stdout.readline)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def _ready_url(readline: Callable[[], str]) -> str:
    """Return the URL in the document that says that the service is ready."""
    lines = []
    for line in iter(readline, ""):
        lines.append(line)
        if line == "}\n":
            return str(json.loads("".join(lines))["url"])
    raise RuntimeError("moetune serve did not start")


def _start_seconds(db: Path) -> str:
    seconds = []
    for _ in range(_NUM_STARTS):
        start = time.perf_counter()
        with served(db):
            seconds.append(time.perf_counter() - start)
    return format_seconds(statistics.median(seconds))


async def _known_plans(url: str, ids: Sequence[str]) -> list[_Row]:
    requests = [get(f"/v1/plans/{one}") for one in ids]
    await load(url, requests, num_connections=_NUM_CONNECTIONS, num_seconds=2.0)
    closed = await load(url, requests, num_connections=_NUM_CONNECTIONS, num_seconds=_LOAD_SECONDS)
    paced = await load(
        url,
        requests,
        num_connections=_NUM_CONNECTIONS,
        num_seconds=_LOAD_SECONDS,
        offered_per_second=_OFFERED_PER_SECOND,
    )
    name = f"known plan by id, {_NUM_CONNECTIONS} connections"
    return [
        (f"{name}, each asks again at once: a second", "1,000", f"{closed.per_second:,.0f}"),
        ("… p50, p99", "", _two(closed)),
        (
            f"{name}, {_OFFERED_PER_SECOND:,} requests a second offered: p99",
            "10 ms",
            format_seconds(paced.quantile(0.99)),
        ),
        ("… p50, requests a second", "",
         f"{format_seconds(paced.quantile(0.5))}, {paced.per_second:,.0f}"),
    ]  # fmt: skip


async def _one_new_plan(url: str) -> list[_Row]:
    """Time one rank that asks for a new plan, and many that ask for another one at once."""
    alone = await _resolve(url, num_ranks=1, tokens=20_001)
    background = await _resolve(url, num_ranks=_NUM_RANKS, tokens=20_002)
    return [
        ("a new plan, one rank asks", "", format_seconds(alone)),
        (
            f"a new plan, {_NUM_RANKS} ranks ask at once: until the last has it",
            "solved once",
            format_seconds(background),
        ),
    ]


async def _resolve(url: str, *, num_ranks: int, tokens: int) -> float:
    body = json.dumps({"model": "gpt-s", "profile": _PROFILE, "tokens_per_rank": tokens}).encode()
    request = (
        b"POST /v1/plans:resolve HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    connections = [await Connection.open(url) for _ in range(num_ranks)]
    start = time.perf_counter()
    answers = await asyncio.gather(*(one.ask(request) for one in connections))
    spent = time.perf_counter() - start
    await together([one.close() for one in connections])
    if len(set(answers)) != 1:
        raise RuntimeError("ranks were given different plans")
    return spent


async def _observed(url: str) -> list[_Row]:
    connection = await Connection.open(url)
    start = time.perf_counter()
    body = await connection.ask(get("/v1/observations?limit=500"))
    spent = format_seconds(time.perf_counter() - start)
    await connection.close()
    name = f"{_NUM_OBSERVATIONS:,} observations"
    return [(f"{name}, 500 of them as JSON", "", f"{spent}, {len(body) / 2**20:.2f} MiB")]


def _two(latencies: Latencies) -> str:
    return ", ".join(format_seconds(latencies.quantile(share)) for share in (0.5, 0.99))


def _cpu() -> str:
    lines: Sequence[str] = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
