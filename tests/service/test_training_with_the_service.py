"""Two ranks train with a real service: its plan, its death, and what the page says afterwards."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
import torch.distributed as dist

import moetune
from moetune.app.files import profile_to_toml
from tests.ranks import run_ranks
from tests.report.lab import lab_profile
from tests.service.asking import Served, served

ASKED = {
    "profile": "lab",
    "layer": {"d_model": 32, "d_hidden": 64, "num_experts": 4, "top_k": 2},
    "tokens_per_rank": 64,
    "dtype": "float32",
}
STEPS = 10
PATIENCE_SECONDS = 240.0


def _wait_for(what: str, is_there: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_there():
        assert time.monotonic() < end, f"no {what} within {PATIENCE_SECONDS:g} s"
        time.sleep(0.02)


def _all_know(file: Path) -> bool:
    known = torch.tensor(int(file.exists()))
    dist.all_reduce(known, dist.ReduceOp.MIN)
    return bool(known)


def _train(url: str, folder: str) -> None:
    torch.manual_seed(0)
    book = moetune.open_planbook(ASKED, service=url, observe_every=1)
    layer = moetune.MoELayer(32, 64, 4, 2, planbook=book, dtype=torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)

    def step() -> None:
        layer(torch.randn(64, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    Path(folder, f"half-{dist.get_rank()}").touch()
    # A slow host's first batch may be dropped; later steps have the next one.
    while not _all_know(Path(folder, "killed")):
        step()
        time.sleep(0.1)
    for _ in range(STEPS):
        step()
    (plan,) = book.plans
    Path(folder, f"plan-{dist.get_rank()}").write_text(plan.id)
    book.close()


def _kill_in_mid_run(service: Served, folder: Path) -> list[dict[str, object]]:
    """Kill the service once it has observations and both ranks are half through."""

    def kept() -> list[dict[str, object]]:
        found = httpx.get(f"{service.url}/v1/observations", timeout=PATIENCE_SECONDS).json()[
            "items"
        ]
        return list(found)

    _wait_for("observation", kept)
    _wait_for("rank at half its steps", lambda: len(list(folder.glob("half-*"))) == 2)
    before = kept()
    service.process.kill()
    service.process.wait()
    (folder / "killed").touch()
    return before


@pytest.mark.dist
def test_two_ranks_train_with_a_plan_of_the_service_and_outlive_it(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    db = tmp_path / "team.db"
    with ThreadPoolExecutor(1) as beside, served(tmp_path, db=db) as service:
        upload = httpx.post(
            f"{service.url}/v1/profiles", content=profile_to_toml(lab_profile()),
            headers={"Content-Type": "application/toml"}, timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        assert upload.status_code == 201
        # Its first plan takes a slow host longer than a job waits for an answer.
        inputs = {"world_size": 2, **ASKED}
        planned = httpx.post(
            f"{service.url}/v1/plans:resolve", json=inputs, timeout=PATIENCE_SECONDS
        )
        assert planned.status_code == 200, planned.text
        killing = beside.submit(_kill_in_mid_run, service, ranks)
        assert run_ranks(_train, 2, service.url, str(ranks), timeout_seconds=240) == ["", ""]
        observed = killing.result()
    (plan_id,) = {path.read_text() for path in ranks.glob("plan-*")}
    assert {one["plan_id"] for one in observed} == {plan_id}
    with (
        served(tmp_path, db=db) as again,
        httpx.Client(base_url=again.url, timeout=PATIENCE_SECONDS) as client,
    ):
        assert client.get(f"/v1/plans/{plan_id}").json()["inputs"]["world_size"] == 2
        stored = client.get("/v1/observations", params={"plan": plan_id}).json()["items"]
        assert len(stored) >= len(observed)
        assert {row["source"] for row in stored} == {"training"}
        page = client.get(f"/plans/{plan_id}").text
        assert f"{len(stored):,} observations; the latest" in page
