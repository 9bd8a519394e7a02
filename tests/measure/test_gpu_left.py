"""What a GPU's memory leaves for tensors is measured, and plans do not fill the last of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.plan import make_plan
from moetune.app.recording import Progress, RecordedRun
from moetune.domain.cluster import Cluster, Fingerprint, Machine
from moetune.domain.question import Question
from moetune.domain.samples import GemmPoint, Sample
from moetune.measure.device import open_device
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.session import Assignment, Estimates, News, run_session
from moetune.store import open_store
from tests.cuda_kit import FakeCuda, MirrorWorld

GIB = 2**30
POINT = GemmPoint(rows=16, d_in=16, d_out=16, dtype="float32")


def _taken(cuda: FakeCuda) -> int:
    """Return what a GPU's context takes, and NCCL from its first exchange on."""
    has_exchanged = any(operation.lane.name.startswith("NCCL") for operation in cuda.operations)
    return GIB + (2 * GIB if has_exchanged else 0)


def _news_of_a_session(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> Sequence[News]:
    news: list[News] = []
    with FakeCuda() as cuda, MirrorWorld(cuda, num_ranks=num_ranks, rank=0):
        reserved = 3 * GIB
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda _: (16 * GIB + 5 - reserved - _taken(cuda), 16 * GIB)
        )
        monkeypatch.setattr("moetune.measure.session._Visits.visit_all", lambda *_: None)
        run_session(Assignment(needed=(POINT,), preset="quick"),
                    device=open_device(1), ranks=MeasuringRanks(), on_news=news.append)  # fmt: skip
    monkeypatch.undo()
    return news


def test_usable_memory_is_what_is_left_once_nccl_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_ranks, usable_bytes in ((2, 13 * GIB), (1, 15 * GIB)):
        (estimates,) = _news_of_a_session(monkeypatch, num_ranks)
        assert isinstance(estimates, Estimates)
        assert estimates.usable_bytes == usable_bytes


def test_the_profiles_machine_has_the_memory_that_was_measured(tmp_path: Path) -> None:
    machine = Machine(
        kind="cuda", device="a GPU", num_devices=2, devices_per_node=2, memory_bytes=16 * GIB
    )
    with open_store(f"sqlite:///{tmp_path}/moetune.db") as store:
        cluster = Cluster(machine=machine, fingerprint=Fingerprint())
        run = RecordedRun(store, name="lab", cluster=cluster, preset="quick", progress=Progress())
        estimates = Estimates(seconds={POINT: 1.0}, total_seconds=1.0, usable_bytes=13 * GIB)
        run.receive(estimates)
        run.receive(Sample(point=POINT, seconds=(1.0,)))
        assert run.cluster.machine == replace(machine, memory_bytes=13 * GIB)


def test_the_most_tokens_of_a_plan_are_those_that_leave_it() -> None:
    profile = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
    request = Question(d_model=1024, d_hidden=4096, num_experts=64, tokens=4096)
    planned = make_plan(request, profile=profile)
    limit = replace(request, memory_limit=profile.machine.memory_bytes * 92 // 100)
    limited = make_plan(limit, profile=profile)
    assert planned.pipeline.ranges == limited.pipeline.ranges
