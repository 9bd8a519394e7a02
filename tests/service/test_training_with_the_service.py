"""Two ranks train with a plan of a real service, which dies meanwhile."""

import os
import signal
from pathlib import Path

import httpx
import pytest
import torch
import torch.distributed as dist

import moetune
from moetune.app.files import profile_to_toml
from tests.ranks import run_ranks
from tests.report.lab import lab_profile
from tests.service.asking import served

ASKED = {
    "profile": "lab",
    "layer": {"d_model": 32, "d_hidden": 64, "num_experts": 4, "top_k": 2},
    "tokens_per_rank": 64,
    "dtype": "float32",
}
STEPS = 10
PATIENCE_SECONDS = 240.0


def _train(url: str, process: int, folder: str) -> None:
    """Train; half through the first rank kills the service."""
    torch.manual_seed(0)
    book = moetune.open_planbook(ASKED, service=url)
    layer = moetune.MoELayer(32, 64, 4, 2, plan=book, dtype=torch.float32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    for number in range(STEPS):
        if number == STEPS // 2 and dist.get_rank() == 0:
            os.kill(process, signal.SIGKILL)
        layer(torch.randn(64, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (plan,) = book.plans
    assert layer.decision == plan.decide(64)
    Path(folder, f"plan-{dist.get_rank()}").write_text(plan.id)


@pytest.mark.dist
def test_two_ranks_train_with_a_plan_of_the_service_and_outlive_it(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    db = tmp_path / "team.db"
    with served(tmp_path, db=db) as service:
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
        started = service.url, service.process.pid, str(ranks)
        assert run_ranks(_train, 2, *started, timeout_seconds=240) == ["", ""]
        assert service.process.wait(timeout=PATIENCE_SECONDS) == -signal.SIGKILL
    (plan_id,) = {path.read_text() for path in ranks.glob("plan-*")}
    with (
        served(tmp_path, db=db) as again,
        httpx.Client(base_url=again.url, timeout=PATIENCE_SECONDS) as client,
    ):
        assert client.get(f"/v1/plans/{plan_id}").json()["inputs"]["world_size"] == 2
