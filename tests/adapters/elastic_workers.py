"""What ranks do in the tests of jobs that stop and go on."""

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from examples import finetune, train_lm
from moetune.domain.errors import CollectiveError
from moetune.runtime.parallel.stages import Stages

CPU = torch.device("cpu")
DIES_IN_STEP = 2


def losses_in(folder: Path) -> dict[int, float]:
    """Return the losses that a job has printed, by step."""
    lines = re.findall(r"^step (\d+): loss (\S+),", (folder / "output").read_text(), re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}


def train(folder: Path, weights: Path, steps: int, stop_in_step: int | None = None) -> None:
    """Run the example in its own folder; SIGTERM may reach the last rank in a step."""
    words = ["--steps", str(steps), "--batch", "6", "--dtype", "float64", "--every", "2"]
    words += ["--weights", str(weights), "--checkpoints", str(folder / "checkpoints")]
    is_last = dist.get_rank() == dist.get_world_size() - 1
    output = folder / "output" if dist.get_rank() == 0 else Path(os.devnull)
    with pytest.MonkeyPatch.context() as patch, output.open("a") as file:
        _in_float64(patch)
        if stop_in_step is not None and is_last:
            _signal_in_step(patch, signal.SIGTERM, stop_in_step)
        with contextlib.redirect_stdout(file):
            is_complete = finetune.train(finetune.parse(words), CPU)
    assert is_complete == (stop_in_step is None)


def _signal_in_step(patch: pytest.MonkeyPatch, which: signal.Signals, number: int) -> None:
    original, calls = finetune.batch, iter(range(1, number + 1))

    def batch(*arguments: Any) -> torch.Tensor:
        if next(calls, None) == number:
            os.kill(os.getpid(), which)
        return original(*arguments)

    patch.setattr(finetune, "batch", batch)


def lose_a_rank(weights: Path) -> None:
    """The last rank is killed in a step; in the second one DDP has collectives of its own."""
    words = ["--steps", "4", "--batch", "6", "--weights", str(weights)]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            _signal_in_step(patch, signal.SIGKILL, DIES_IN_STEP + 1)
        with pytest.raises(CollectiveError, match=rf"failed on rank {dist.get_rank()} of 3"):
            finetune.train(finetune.parse(words), CPU)


def lose_a_rank_in_a_save(folder: Path, weights: Path) -> None:
    """The last rank is killed while it writes the second checkpoint."""
    words = ["--steps", "2", "--batch", "6", "--weights", str(weights), "--every", "1"]
    words += ["--checkpoints", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            _kill_in(patch, FileSystemWriter, "write_data")
        with pytest.raises((CheckpointException, RuntimeError)):
            finetune.train(finetune.parse(words), CPU)


def lose_a_stage(method: str) -> None:
    """The last of three stages is killed in a step."""
    words = ["--pp", "3", "--blocks", "3", "--moe-every", "1", "--steps", "4", "--batch", "4"]
    words += ["--context", "16", "--d-model", "16", "--d-hidden", "16", "--experts", "2"]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1:
            _kill_in(patch, Stages, method)
        with pytest.raises(CollectiveError, match=r"stages.* failed on rank . of 3"):
            train_lm.train(train_lm.parse(words), "cpu")


def _kill_in(patch: pytest.MonkeyPatch, kind: type, method: str) -> None:
    """Let the second call of a method kill this rank."""
    original, calls = getattr(kind, method), iter((1, DIES_IN_STEP))

    def call(*arguments: Any) -> Any:
        if next(calls) == DIES_IN_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    patch.setattr(kind, method, call)


def _in_float64(patch: pytest.MonkeyPatch) -> None:
    """Let transformers round nothing to float32: what a rank rounds depends on its tokens."""
    softmax = functional.softmax

    def wide_softmax(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return softmax(x, **{**options, "dtype": x.dtype})

    def wide_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
        variance = x.square().mean(-1, keepdim=True)
        result: torch.Tensor = norm.weight * x * torch.rsqrt(variance + norm.variance_epsilon)
        return result

    patch.setattr(functional, "softmax", wide_softmax)
    patch.setattr(Qwen3MoeRMSNorm, "forward", wide_norm)
