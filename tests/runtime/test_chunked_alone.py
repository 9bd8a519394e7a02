"""Chunks on one rank: models of every habit, errors, memory and the order of uses."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import moetune
from moetune.runtime.sharded import options as shard_options
from tests.runtime import chunked_models as models
from tests.runtime.chunked_workers import (
    CHUNK_BYTES,
    Case,
    check_equals_plain,
    exact_loss_of,
    sharded,
    step_sharded,
)

TOKENS = torch.arange(10).view(2, 5)


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
    twin.load_state_dict(moetune.full_state_dict(model))
    for trained in (model, twin):
        loss = exact_loss_of(trained, TOKENS)
        loss.backward(retain_graph=True)
        loss.backward()
    model_norm = optimizer.clip_grad_norm_(1e9)
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
    found, wanted = moetune.full_state_dict(model), moetune.full_state_dict(twin)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_states_of_four_times_the_device_budget_train() -> None:
    model, optimizer = sharded(case := Case(make=models.Plain, places=2, options={"offload": True}))
    for step in range(3):
        step_sharded(case, step, model, optimizer)
    chunks = moetune.model_chunks(model)
    # Parameter, gradient and two moments of every element, in float64.
    states = 4 * sum(parameter.numel() * 8 for parameter in model.parameters())
    assert chunks.peak_device_bytes <= 2 * CHUNK_BYTES
    assert states >= 4 * chunks.peak_device_bytes


def test_a_step_moves_what_belady_would() -> None:
    model, optimizer = sharded(case := Case(make=models.Plain, places=2))
    chunks = moetune.model_chunks(model)
    before = chunks.traffic
    for step in range(3):
        before = chunks.traffic
        step_sharded(case, step, model, optimizer)
    moved = chunks.traffic - before
    # Four chunks, two places: 0 1 2 3 forward, then 3 2 from the cache, and 1 0 again.
    assert (moved.gathers, moved.reduces) == (6, 4)


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
    wanted = copy.deepcopy(moetune.full_state_dict(model))
    assert all(value.isfinite().all() for value in wanted.values())


def test_a_scheduler_sets_the_rate_of_the_shards() -> None:
    _, optimizer = sharded(Case(make=models.Plain))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-3)


def test_a_whole_state_loads_into_other_chunks() -> None:
    model, optimizer = sharded(case := Case(make=models.Tied, places=2))
    step_sharded(case, 0, model, optimizer)
    saved = moetune.full_state_dict(model)
    other, _ = sharded(Case(make=models.Tied, chunk_bytes=2 * CHUNK_BYTES))
    moetune.load_full_state_dict(other, saved)
    plain = models.Tied().double()
    plain.load_state_dict(saved)
    with torch.no_grad():
        torch.testing.assert_close(other(TOKENS), plain(TOKENS), rtol=0, atol=1e-12)
    with pytest.raises(moetune.InputError, match=r"moetune\.full_state_dict"):
        model.state_dict()


def _shard(model: nn.Module, **options: Any) -> None:
    moetune.shard(model, torch.optim.SGD(model.parameters()), **options)


def test_bad_input_names_the_parameter_and_the_number() -> None:
    with pytest.raises(moetune.InputError, match=r"blocks\.0\.up\.weight .*512 B"):
        _shard(models.Plain(), chunk_bytes=448)
    with pytest.raises(moetune.InputError, match=r"6399 .*3200"):
        _shard(models.Plain(), chunk_bytes=3200, cache_bytes=6399)
    model = models.Plain()
    with pytest.raises(moetune.InputError, match=r"parameter 0 .* shape \(12, 8\)"):
        moetune.shard(model, torch.optim.SGD(models.Plain().parameters()))
    with pytest.raises(moetune.InputError, match="LBFGS"):
        moetune.shard(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(moetune.InputError, match="is not sharded"):
        moetune.full_state_dict(model)


@pytest.mark.parametrize("through_view", [False, True])
def test_a_parameter_that_is_read_outside_of_its_module_is_named(*, through_view: bool) -> None:
    model, _ = sharded(Case(make=lambda: models.Borrowing(through_view=through_view), places=2))
    with pytest.raises(moetune.InputError, match=r"embedding\.weight is read outside .*module"):
        model(TOKENS)


def test_a_parameter_added_after_sharding_is_named() -> None:
    model, _ = sharded(Case(make=models.Plain))
    model.late = nn.Linear(3, 4)
    with pytest.raises(moetune.InputError, match=r"late\.bias was added, replaced or removed"):
        model(TOKENS)


def test_a_module_that_needs_more_chunks_than_places_is_named() -> None:
    x = torch.ones(2, 3, 16, dtype=torch.float64)
    wide = nn.ModuleDict({"a": nn.MultiheadAttention(16, 2, kdim=8, vdim=8)}).double()
    _shard(wide, chunk_bytes=2048, cache_bytes=2 * 2048)
    y = torch.ones(2, 3, 8, dtype=torch.float64)
    with pytest.raises(moetune.InputError, match=r"a \(a\..*\) .*\b5 .*\b2\b"):
        wide["a"](x, y, y)


def test_host_memory_that_is_too_small_is_an_error_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_options, "available_bytes", lambda: 1000)
    model = models.Plain()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(moetune.AllocationError, match=r"[0-9]+ bytes"):
        _shard(model, chunk_bytes=3200, offload=True)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before
