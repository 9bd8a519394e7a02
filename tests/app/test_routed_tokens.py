"""Tokens that follow a recorded routing, and a layer that is verified with them."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.cli import app
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.routing import ExpertLoads
from moetune.measure.sizes import expert_shares
from moetune.measure.steps import drawn_experts, random_steps
from moetune.store import open_store
from tests.report.lab import lab_profile

LOADS = "8 4 2 1 1 0 0 0"


@settings(max_examples=60, deadline=None)
@given(loads=st.lists(st.floats(0, 100), min_size=4, max_size=12).filter(any),
       top_k=st.integers(1, 4), num_tokens=st.integers(1, 300))  # fmt: skip
def test_each_expert_is_drawn_as_often_as_its_share_and_once_for_a_token(
    loads: list[float], top_k: int, num_tokens: int
) -> None:
    shares = ExpertLoads(name="test", loads=tuple(loads)).shares(top_k)
    assert shares is not None
    experts_TK = drawn_experts(shares, top_k, num_tokens, torch.Generator().manual_seed(1))
    counts = torch.bincount(experts_TK.reshape(-1), minlength=len(loads))
    for count, share in zip(counts.tolist(), shares, strict=True):
        assert abs(count - share * top_k * num_tokens) <= top_k + 1e-6
    assert all(len(set(row)) == top_k for row in experts_TK.tolist())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_gate_chooses_what_was_drawn(dtype: str, top_k: int) -> None:
    workload = Workload(
        layer=LayerShape(d_model=16, d_hidden=8, num_experts=8, top_k=top_k), world_size=1,
        tokens_per_rank=160, dtype=dtype, routing=f"{LOADS} / 1.2",
    )  # fmt: skip
    steps = random_steps(workload, device=torch.device("cpu"))
    chosen = steps.layer.gate(steps.x_TD.detach()).experts_TK
    counts = torch.bincount(chosen.reshape(-1), minlength=8).tolist()
    shares = expert_shares(workload)
    assert shares is not None
    wanted = [160 * top_k * share for share in shares]
    assert counts == pytest.approx(wanted, abs=1 + top_k)


@pytest.mark.parametrize(
    ("routing", "num_experts", "words"),
    [("natural", 8, "single experts"), (f"{LOADS} {LOADS} {LOADS} / 1", 24, "width 16")],
)
def test_what_tokens_cannot_follow_is_refused(routing: str, num_experts: int, words: str) -> None:
    workload = Workload(layer=LayerShape(d_model=16, d_hidden=8, num_experts=num_experts),
                        world_size=1, tokens_per_rank=8, routing=routing)  # fmt: skip
    with pytest.raises(InputError, match=words):
        expert_shares(workload)


@pytest.mark.thorough
@pytest.mark.parametrize(("order", "imbalance"), [("natural", 30 / 16), ("planned", 1.0)])
def test_verify_runs_the_layer_with_the_plans_routing_and_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str, imbalance: float
) -> None:
    db, loads = tmp_path / "m.db", tmp_path / "loads.txt"
    loads.write_text(LOADS.replace(" ", "\n"), encoding="utf-8")
    with open_store(str(db)) as store:
        store.save_profile(lab_profile())
    common = ["--no-config", "--db", str(db)]
    flags = [
        "plan", "--d-model", "64", "--d-hidden", "256", "--num-experts", "8", "--tokens", "512",
        "--world-size", "2", "--dtype", "float32", "--profile", "lab", "--allow-modelled",
        "--routing", str(loads), "--expert-placement", order, "--json",
    ]  # fmt: skip
    assert app.main([*common, *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    code = app.main([*common, "verify", plan["id"], "--nproc", "2", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if document["is_inside"] and not document["has_lost"] else 6)
    assert document["imbalance"] == pytest.approx(imbalance, rel=0.02)
    assert document["steps"]
    assert all(step["deviation"] <= document["tolerance"] for step in document["steps"])
