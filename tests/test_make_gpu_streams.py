"""The parts of `make gpu` on a fake GPU: what only a GPU does, with its streams and its memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.chunks import CAP_BYTES, run_chunks
from benchmarks.gpu.layers import run_layers
from benchmarks.gpu.reuse import run_reuse
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.scale import Scale, dry_scale
from tests.cuda_kit import FakeCuda

ALLOCATED_BYTES = 2**20


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scale]:
    """Small sizes for one fake GPU, whose allocator says the same every time."""
    with FakeCuda(num_devices=1):
        nothing = ("reset_peak_memory_stats", "empty_cache", "set_per_process_memory_fraction")
        for name in nothing:
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: ALLOCATED_BYTES)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        jobs = tuple(job for job in dry_scale().jobs if job.way == "plain")
        yield replace(dry_scale(), device="cuda", num_ranks=1, jobs=jobs)


def test_layers_and_reuse_wait_for_the_loopback(scale: Scale, tmp_path: Path) -> None:
    run_layers(scale, tmp_path)
    run_reuse(scale, tmp_path)
    layers, reuse = Rows(tmp_path, "layers"), Rows(tmp_path, "reuse")
    assert [row["degree"] for row in layers] == list(scale.degrees)
    assert all(row["deviation"] < 1e-5 for row in layers)
    assert {row["backward_peak_bytes"] for row in reuse} == {ALLOCATED_BYTES}


def test_models_are_made_on_the_gpu_within_the_cap(
    scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    run_chunks(scale, tmp_path)
    assert shares == [min(1.0, CAP_BYTES / 2**34)]
    rows = list(Rows(tmp_path, "chunks"))
    assert not [row["failure"] for row in rows if "failure" in row]
    assert {row["peak_bytes"] for row in rows} == {ALLOCATED_BYTES}
