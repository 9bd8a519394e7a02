"""Chunks on one rank: models of every habit, errors, memory and the order of uses."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import moetune
from moetune.runtime.sharded import options as shard_options
from tests.ranks import single_rank_group
from tests.runtime import chunked_models as models
from tests.runtime.chunked_workers import (
    Case,
    check_equals_plain,
    exact_loss_of,
    sharded,
    step_sharded,
    whole_state,
)

TOKENS = torch.arange(10).view(2, 5)


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    with single_rank_group():
        yield


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
        (torch.optim.SGD, {"lr": 1e-4, "maximize": True}),
    ],
)
def test_every_optimizer_steps_as_on_the_whole_model(
    optimizer: type[torch.optim.Optimizer], settings: dict[str, object]
) -> None:
    check_equals_plain(
        Case(make=models.Twice, places=2, optimizer=optimizer, settings=settings, steps=20)
    )


def test_gradients_of_micro_batches_add_up_and_are_clipped() -> None:
    check_equals_plain(
        Case(make=models.Plain, places=2, micro_batches=3, max_norm=0.1, evaluates=True)
    )


def test_a_graph_can_be_used_twice() -> None:
    model, optimizer = sharded(case := Case(make=models.Plain, places=2))
    step_sharded(case, 0, model, optimizer)
    twin = models.Plain().double()
    twin.load_state_dict(whole_state(model))
    for trained in (model, twin):
        loss = exact_loss_of(trained, TOKENS)
        loss.backward(retain_graph=True)
        loss.backward()
    model_norm = moetune.clip_grad_norm_(model, 1e9)
    twin_norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
    torch.testing.assert_close(model_norm, twin_norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("fails_backward", [False, True])
def test_an_error_in_a_pass_leaves_the_model_usable(*, fails_backward: bool) -> None:
    case = Case(make=models.Plain, places=2)
    (model, optimizer), (twin, steady) = sharded(case), sharded(case)

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    for step in range(2):
        handle = model.blocks[1].register_forward_hook(
            lambda _, __, output: output.register_hook(fail) and None
        )
        with pytest.raises(ZeroDivisionError if fails_backward else IndexError):
            model(TOKENS if fails_backward else torch.tensor([[99]])).sum().backward()
        handle.remove()
        optimizer.zero_grad()
        step_sharded(case, step, model, optimizer)
        step_sharded(case, step, twin, steady)
    state, wanted = whole_state(model), whole_state(twin)
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def test_a_step_moves_what_belady_would() -> None:
    model, optimizer = sharded(case := Case(make=models.Plain, places=2))
    chunks = moetune.model_chunks(model)
    before = chunks.num_gathers
    for step in range(3):
        before = chunks.num_gathers
        step_sharded(case, step, model, optimizer)
    # Four chunks, two places: 0 1 2 3 forward, then 3 2 from the cache, and 1 0 again.
    assert chunks.num_gathers - before == 6


def test_a_changed_order_is_recorded_anew() -> None:
    model, optimizer = sharded(case := Case(make=models.Plain, places=2))
    for step in range(3):
        step_sharded(case, step, model, optimizer)
    blocks = list(model.blocks)
    model.blocks._modules["0"], model.blocks._modules["3"] = blocks[3], blocks[0]
    old = moetune.model_chunks(model).order
    for step in range(3):
        step_sharded(case, step, model, optimizer)
    assert moetune.model_chunks(model).order != old
    assert all(value.isfinite().all() for value in whole_state(model).values())


def test_a_scheduler_sets_the_rate_of_the_shards() -> None:
    _, optimizer = sharded(Case(make=models.Plain))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)


def test_a_graph_sees_the_hooks_of_a_view_that_is_changed_in_place() -> None:
    case = Case(make=lambda: models.Plain(adds_in_place=True), make_twin=models.Plain, places=2)
    check_equals_plain(case)


def _shard(model: nn.Module, **options: Any) -> None:
    moetune.shard(model, torch.optim.SGD(model.parameters()), **options)


def test_bad_input_names_the_parameter_and_the_number() -> None:
    with pytest.raises(moetune.InputError, match=r"cache_bytes 4000 .* 2\d\d\d bytes"):
        _shard(models.Plain(), chunk_bytes=3200, cache_bytes=4000)
    narrow = models.Plain()
    narrow.head.weight.data = narrow.head.weight.data.bfloat16()
    with pytest.raises(moetune.InputError, match=r"head has parameters of several dtypes"):
        _shard(narrow)
    model = models.Plain()
    with pytest.raises(moetune.InputError, match=r"parameter 0 .* shape \(12, 8\)"):
        moetune.shard(model, torch.optim.SGD(models.Plain().parameters()))
    with pytest.raises(moetune.InputError, match="LBFGS"):
        moetune.shard(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(moetune.InputError, match="is not sharded"):
        moetune.model_chunks(model)


def test_a_parameter_that_is_read_outside_of_its_module_is_an_error() -> None:
    model, _ = sharded(Case(make=models.Borrowing, places=2))
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model(TOKENS)


def test_a_reentrant_checkpoint_is_named() -> None:
    model, _ = sharded(Case(make=lambda: models.Checkpointed(use_reentrant=True), places=2))
    with pytest.raises(moetune.InputError, match="use_reentrant=False"):
        exact_loss_of(model, TOKENS).backward()


class _Nested(nn.Module):
    """Modules with a parameter each, in each other."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.inner = _Nested(depth - 1) if depth else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x) * self.scale
        return y


def test_modules_that_need_more_chunks_than_places_are_named() -> None:
    model = _Nested(3)
    _shard(model, chunk_bytes=256, cache_bytes=512)
    with pytest.raises(moetune.InputError, match=r"inner\.inner\.inner .* 3 chunks .* holds 2"):
        model(torch.ones(2, 64))


def test_host_memory_that_is_too_small_is_an_error_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_options, "available_bytes", lambda: 1000)
    model = models.Plain()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(moetune.AllocationError, match=r"[0-9]+ bytes"):
        _shard(model, chunk_bytes=3200, offload=True)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
