"""Ranks of a launch on GPUs: each uses its own, whatever the launcher lets it see."""

from functools import partial
from typing import Any

import pytest
import torch

from moetune.app import verify
from moetune.app.launch import rank_device, run_on_ranks
from moetune.app.subjects import LayerSubject
from moetune.app.trace import recorded_trace
from moetune.config import Launch
from moetune.domain.layer import LayerShape
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.runtime.plans import small_plan


def _launch(monkeypatch: pytest.MonkeyPatch, *, rank: int, world_size: int) -> Launch:
    """Return a rank's place in a launch, which its environment says as well."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(rank))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(world_size))
    return Launch(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size,
                  master_addr="127.0.0.1", master_port=1)  # fmt: skip


def _devices(*_: object) -> tuple[int, torch.device]:
    return torch.cuda.current_device(), rank_device()


@pytest.mark.parametrize(
    ("num_devices", "rank", "wanted"), [(4, 0, 0), (4, 3, 3), (1, 3, 0), (2, 1, 1)]
)
def test_the_current_device_is_that_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, rank: int, wanted: int
) -> None:
    launch = _launch(monkeypatch, rank=rank, world_size=4)
    with FakeCuda(num_devices) as cuda, MirrorWorld(cuda, rank=rank, num_ranks=4):
        devices = run_on_ranks(
            _devices, None, num_ranks=4, launch=launch, environ={}, oversubscribe=False
        )
    assert devices == (wanted, torch.device("cuda", wanted))


def test_a_rank_alone_has_the_first_device_and_without_gpus_the_cpu() -> None:
    assert rank_device() == torch.device("cpu")
    with FakeCuda():
        assert rank_device() == torch.device("cuda", 0)


def test_the_second_ranks_step_is_verified_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(
        layer=LayerShape(d_model=16, d_hidden=32, num_experts=4), world_size=2, tokens=2
    )
    monkeypatch.setattr(verify, "NUM_ROUNDS", 1)
    launch = _launch(monkeypatch, rank=1, world_size=2)
    options: dict[str, Any] = {
        "num_ranks": None, "launch": launch, "environ": {}, "oversubscribe": False,
    }  # fmt: skip
    for run in (
        partial(recorded_trace, LayerSubject(plan=plan)),
        partial(verify.verify_plan, plan, profile=None),
    ):
        with FakeCuda() as cuda, MirrorWorld(cuda, rank=1):
            assert run(**options) is None  # only the first rank answers
            devices = {operation.lane.device for operation in cuda.operations}
            assert devices == {torch.device("cpu"), torch.device("cuda", 1)}
