"""What ranks do in the tests of wrong inputs, faults and wrappers."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moetune.domain.errors import (
    AllocationError,
    CollectiveError,
    InputError,
    RankMismatchError,
)
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.workspace import MemoryTracker
from moetune.runtime.parallel.gradients import prepare_ddp
from moetune.runtime.plans.shared import FoundPlans, read_plans, share_plans
from tests.runtime.workers import relative_error


def make(**options: object) -> MoELayer:
    torch.manual_seed(3)
    arguments: dict[str, object] = {
        "d_model": 8, "d_hidden": 16, "num_experts": 4, "top_k": 2, "pipeline": 3,
    }  # fmt: skip
    return MoELayer(**(arguments | options))  # type: ignore[arg-type]  # options of any kind


def disagreement(kind: str) -> None:
    rank = dist.get_rank()
    options: dict[str, object] = {}
    x = torch.randn(5, 8)
    if kind == "degree" and rank == 1:
        options = {"pipeline": 2}
    if kind == "dtype" and rank == 1:
        options, x = {"dtype": torch.float64}, x.double()
    if kind == "width" and rank == 1:
        x = torch.randn(5, 7)
    if kind == "gradients" and rank == 1:
        x.requires_grad_()
    layer = make(**options)
    with pytest.raises(RankMismatchError) as caught:
        layer(x)
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0]


def dying_rank() -> None:
    layer = make()
    x = torch.randn(64, 8, requires_grad=True)
    layer(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match=r"agreement on tokens|token counts|dispatch"):
        _forward_often(layer, x)


def _forward_often(layer: MoELayer, x: torch.Tensor) -> None:
    for _ in range(3):
        layer(x)


def death_in_backward() -> None:
    layer = make()
    x = torch.randn(64, 8, requires_grad=True)
    y = layer(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError, match="backward"):
        y.sum().backward()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.moe = make(dtype=torch.float64)
        self.after = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(x + self.moe(torch.tanh(self.before(x))))
        return result


def _net() -> Net:
    torch.manual_seed(11)
    return Net().double()


def ddp_equals_whole_batch(whole: Path) -> None:
    """DDP on two ranks takes the step that one process takes on both batches."""
    rank = dist.get_rank()
    saved = torch.load(whole)
    net = prepare_ddp(_net())
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        wrapped(saved["x"][rank * 6 : rank * 6 + 6]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in net.state_dict().items():
        found = value.full_tensor() if isinstance(value, DTensor) else value
        assert relative_error(found, saved["after"][name]) <= 1e-12, name


def save_whole_batch(whole: Path) -> None:
    net = _net()
    x = torch.randn(12, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        net(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"x": x, "after": net.state_dict()}, whole)


def initial_weights(whole: Path) -> None:
    """Experts start the same on two ranks as in one process, whatever the ranks' seeds."""
    wanted = torch.load(whole)
    rank = dist.get_rank()
    torch.manual_seed(3 if rank == 0 else 999)
    layer = MoELayer(8, 16, 4, 2)
    for name, value in layer.experts.named_parameters():
        assert torch.equal(value, wanted[f"experts.{name}"][rank * 2 : rank * 2 + 2]), name
    assert torch.equal(layer.gate.weight, wanted["gate.weight"])


def shared_plans(folder: Path) -> None:
    """Only the first rank can read the plans; all have them."""
    rank = dist.get_rank()
    path = folder / "plan.json" if rank == 0 else folder / "not-there.json"
    book = share_plans(lambda: FoundPlans(plans=read_plans([path])))
    assert len(book.plans) == 1
    plan = book.plans[0]
    decision = book.decide(plan.workload.key, tokens_per_rank=plan.inputs.tokens_per_rank)
    assert decision.forward_degree == plan.pipeline.forward_degree


def shared_failure(folder: Path) -> None:
    with pytest.raises(InputError, match="not-there"):
        share_plans(lambda: FoundPlans(plans=read_plans([folder / "not-there.json"])))


def agreed_tokens(plan: Path) -> None:
    """Ranks whose own tokens fall into different ranges run the degree of the largest."""
    rank = dist.get_rank()
    layer = MoELayer(8, 16, 4, 2, plan=plan)
    for tokens in ((1, 40), (40, 1), (2, 3), (0, 0)):
        x = torch.randn(tokens[rank], 8, requires_grad=True)
        layer(x).sum().backward()
        degrees: list[int] = [0, 0]
        dist.all_gather_object(degrees, layer.decision.forward_degree)
        assert degrees[0] == degrees[1]
        assert degrees[0] == (4 if max(tokens) > 10 else 2)


def shortage(strategy: str, phase: str) -> None:
    """Rank 1 finds no memory for a phase's buffers, before it exchanges rows, and leaves."""
    layer = make(memory_reuse=strategy)
    x = torch.randn(64, 8, requires_grad=True)
    layer(x).sum().backward()
    y = layer(x) if phase == "backward" else None
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryTracker, "empty", _no_memory)
            with pytest.raises(AllocationError, match="no device memory"):
                _finish(layer, x, y)
        return
    with pytest.raises(CollectiveError, match=phase if strategy == "none" else r"weights|backward"):
        _finish(layer, x, y)


def _finish(layer: MoELayer, x: torch.Tensor, y: torch.Tensor | None) -> None:
    (layer(x) if y is None else y).sum().backward()


def _no_memory(account: MemoryTracker, what: str, *_: object, **__: object) -> torch.Tensor:
    raise account.short_of(what)
