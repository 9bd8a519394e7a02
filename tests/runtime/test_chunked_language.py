"""The language model in chunks, in every mode and on several ranks, ends as plain training does."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moetune
from examples.language_model import LanguageModel
from moetune.comm.group import OneRank
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from tests.ranks import run_ranks
from tests.runtime import chunked_models as models
from tests.runtime.chunked_workers import (
    Case,
    batches,
    check_equals_plain,
    exact_loss_of,
    rank_and_ranks,
    sharded,
    step_sharded,
)

CHUNK_BYTES = 16_384
STEPS = 8
MODES: dict[str, tuple[int | None, dict[str, Any]]] = {
    "whole": (None, {"scatter": False}),
    "cached": (None, {}),
    "small cache": (6, {}),
    "offloaded": (6, {"offload": True}),
    "offloaded, stepped in the backward pass": (6, {"offload": True, "step_in_backward": True}),
}


def _model(group: dist.ProcessGroup | None, *, dtype: torch.dtype = torch.float64) -> LanguageModel:
    shape = Transformer(
        moe=LayerShape(d_model=16, d_hidden=32, num_experts=4, top_k=2),
        num_layers=4, num_heads=2, length=6, vocab_size=models.VOCABULARY,
    )  # fmt: skip
    sharing: dict[str, Any] = {"group": group} if group is not None else {"communicator": OneRank()}
    model = LanguageModel(
        shape, lambda: moetune.MoELayer(16, 32, 4, 2, pipeline=2, dtype=torch.float64, **sharing)
    )
    model.reset_parameters(3)
    return model.to(dtype)


def _group_of_experts(size: int) -> dist.ProcessGroup | None:
    """Return this rank's group of so many consecutive ranks; every rank makes all of them."""
    _, num_ranks = rank_and_ranks()
    if size == 1:
        return None
    groups = [
        dist.new_group(list(range(first, first + size))) for first in range(0, num_ranks, size)
    ]
    mine: dist.ProcessGroup = groups[dist.get_rank() // size]
    return mine


def _every_mode(size: int) -> None:
    group = _group_of_experts(size)
    for name, (places, options) in MODES.items():
        check_equals_plain(
            Case(
                make=lambda: _model(group),
                make_twin=lambda: _model(None),
                steps=STEPS,
                places=places,
                chunk_bytes=CHUNK_BYTES,
                options=options,
            ),
            f"{name}, experts over {size}",
        )


def test_one_rank_ends_where_plain_training_ends() -> None:
    _every_mode(1)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_ranks", "size"),
    [
        pytest.param(2, 1, marks=pytest.mark.thorough),
        pytest.param(2, 2, marks=pytest.mark.thorough),
        (4, 2),
    ],
)
def test_ranks_end_where_plain_training_ends(num_ranks: int, size: int) -> None:
    assert run_ranks(_every_mode, num_ranks, size) == [""] * num_ranks


def _low_case(options: dict[str, Any]) -> Case:
    return Case(
        make=lambda: _model(None, dtype=torch.float32),
        steps=STEPS,
        places=4,
        settings={"lr": 1e-3},
        dtype=torch.bfloat16,
        chunk_bytes=CHUNK_BYTES,
        options=options,
    )


def _mixed_precision() -> None:
    """Sharded, and twice plainly: gradients of the ranks' batches apart, and of all at once."""
    for options in ({}, {"offload": True}):
        case = _low_case(options)
        model, optimizer = sharded(case)
        start = moetune.full_state_dict(model)
        for step in range(case.steps):
            step_sharded(case, step, model, optimizer)
        end = moetune.full_state_dict(model)
        if end:
            apart = _train_in_mixed_precision(case, start, iter)
            at_once = _train_in_mixed_precision(
                case, start, lambda tokens: iter([torch.cat(tokens)])
            )
            noise = _distance(apart, at_once)
            assert 0 < noise < _distance(apart, start) / 10
            assert _distance(end, apart) <= noise


def _train_in_mixed_precision(
    case: Case,
    start: dict[str, torch.Tensor],
    cut: Callable[[list[torch.Tensor]], Iterator[torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Train float32 masters with the gradients of a bfloat16 copy; return the masters."""
    masters, low = _model(None, dtype=torch.float32), _model(None, dtype=torch.bfloat16)
    masters.load_state_dict(start)
    optimizer = torch.optim.AdamW(masters.parameters(), **case.settings)
    for step in range(case.steps):
        low.load_state_dict(masters.state_dict())
        (tokens,) = batches(case, step)
        parts = list(cut(tokens))
        for some in parts:
            low.zero_grad()
            (exact_loss_of(low, some)).backward()
            _add_gradients(masters, low, 1 / len(parts))
        optimizer.step()
        optimizer.zero_grad()
    return masters.state_dict()


def _add_gradients(masters: nn.Module, low: nn.Module, scale: float) -> None:
    for master, parameter in zip(masters.parameters(), low.parameters(), strict=True):
        assert parameter.grad is not None
        gradient = scale * parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad + gradient


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))


@pytest.mark.dist
def test_bfloat16_is_as_near_to_plain_training_as_plain_training_to_itself() -> None:
    assert run_ranks(_mixed_precision, 2) == ["", ""]
