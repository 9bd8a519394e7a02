"""A job that is killed while it trains and saves leaves whole checkpoints behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import moetune
from tests.runtime import chunked_models as models
from tests.runtime.chunked_workers import Case, sharded, step_sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CASE = Case(make=models.Plain, places=2, options={"offload": True})


def train_and_save(folder: str) -> None:
    """Save after every step, and say so, until somebody ends this."""
    model, optimizer = sharded(CASE)
    for step in range(10_000):
        step_sharded(CASE, step, model, optimizer)
        states = {"app": moetune.ShardedStates(model, optimizer)}
        save(states, checkpoint_id=f"{folder}/{step}", no_dist=True)
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()


def test_a_killed_job_leaves_every_checkpoint_that_it_finished(tmp_path: Path) -> None:
    program = f"from {__name__} import train_and_save; train_and_save({str(tmp_path)!r})"
    command = [sys.executable, "-W", "ignore", "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as job:
        assert job.stdout is not None
        said = [job.stdout.readline().strip() for _ in range(4)]
        os.kill(job.pid, signal.SIGKILL)
    assert said == ["0", "1", "2", "3"]
    twin, steady = sharded(CASE)
    for step in range(4):
        step_sharded(CASE, step, twin, steady)
    model, optimizer = sharded(CASE)
    states = {"app": moetune.ShardedStates(model, optimizer)}
    load(states, checkpoint_id=tmp_path / "3", no_dist=True)
    found, wanted = moetune.full_state_dict(model), moetune.full_state_dict(twin)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
