"""What ranks do in the tests of wrong inputs and faults."""

import os
import signal
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from moetune.domain.errors import AllocationError, CollectiveError, RankMismatchError
from moetune.runtime.moe import workspace
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, TensorExpertLayer

Kind = Literal["all_to_all", "tensor"]


def make(**options: object) -> MoELayer:
    torch.manual_seed(3)
    arguments: dict[str, object] = {
        "d_model": 8, "d_hidden": 16, "num_experts": 4, "top_k": 2, "pipeline": 3,
    }  # fmt: skip
    return MoELayer(**(arguments | options))  # type: ignore[arg-type]  # options of any kind


def _layer_of(kind: Kind, strategy: str = "none") -> ExpertLayer:
    if kind == "all_to_all":
        return make(memory_reuse=strategy)
    return TensorExpertLayer(8, 16, 4, 2)


def same_text(error: Exception) -> str:
    """Return the error's text, which all ranks must have."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(error))
    assert len(set(texts)) == 1
    return texts[0]


def disagreements() -> None:
    for kind in ("degree", "dtype", "width", "gradients"):
        options: dict[str, object] = {}
        x = torch.randn(5, 8)
        if dist.get_rank() == 1:
            if kind == "degree":
                options = {"pipeline": 2}
            elif kind == "dtype":
                options, x = {"dtype": torch.float64}, x.double()
            elif kind == "width":
                x = torch.randn(5, 7)
            else:
                x.requires_grad_()
        layer = make(**options)
        with pytest.raises(RankMismatchError) as caught:
            layer(x)
        assert "rank 1" in same_text(caught.value)


def failed_router(kind: Kind) -> None:
    layer, wanted = _layer_of(kind), AllocationError if dist.get_rank() else RankMismatchError
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank():
            patch.setattr(layer.gate, "forward", _no_memory)
        with pytest.raises(wanted, match="none"):
            layer(torch.randn(5, 8))
    layer(torch.randn(5, 8)).sum().backward()


def death(kind: Kind, phase: str) -> None:
    layer = _layer_of(kind)
    x = torch.randn(64, 8, requires_grad=True)
    y = layer(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    forward = r"agreement on tokens|token counts|dispatch"
    with pytest.raises(CollectiveError, match=forward if phase == "forward" else "backward|grad"):
        _go_on(layer, x, y if phase == "backward" else None)


def _go_on(layer: ExpertLayer, x: torch.Tensor, y: torch.Tensor | None) -> None:
    """Finish the step that has given `y`, or take a few more."""
    for _ in range(3):
        (layer(x) if y is None else y).sum().backward()


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


def shortage(kind: Kind, strategy: str, phase: str) -> None:
    """Rank 1 finds no memory for a phase's buffers, before it exchanges rows, and leaves."""
    layer = _layer_of(kind, strategy)
    x = torch.randn(64, 8, requires_grad=True)
    layer(x).sum().backward()
    y = layer(x) if phase == "backward" else None
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workspace, "allocated", _no_memory)
            with pytest.raises(AllocationError, match="no device memory"):
                _go_on(layer, x, y)
        return
    with pytest.raises(CollectiveError, match=phase if strategy == "none" else r"weights|backward"):
        _go_on(layer, x, y)


def _no_memory(*_: object, **__: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("none")
