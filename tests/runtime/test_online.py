"""The online plan book: what it finds, what it costs, and that ranks never differ."""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import TensorExpertLayer
from moetune.runtime.plans import online
from moetune.runtime.plans.book import PlanBook
from moetune.runtime.plans.online import OnlineSearch
from moetune.runtime.plans.timers import CallWatch, device_clock
from moetune.solve.layer.peak import peak_bytes
from moetune.store import open_store
from tests.ranks import run_ranks
from tests.runtime import online_workers
from tests.runtime.faults import make
from tests.runtime.online_workers import (
    SHAPE,
    MadeUp,
    MadeUpClock,
    best_at,
    online_layer,
    plan_of,
    steps_until_settled,
    study_tuner,
    train,
)
from tests.runtime.plans import small_plan

PLANNED = (4, 4)


def degrees(decision: Decision) -> tuple[int, int]:
    return decision.forward_degree, decision.backward_degree


@pytest.mark.dist
def test_two_ranks_train_on_random_tokens_until_every_range_is_closed(tmp_path: Path) -> None:
    assert run_ranks(online_workers.random_tokens, 2, tmp_path) == ["", ""]


@pytest.mark.dist
@pytest.mark.parametrize(
    "worker", [online_workers.failing_tuner, online_workers.group_of_another_size]
)
def test_two_ranks_meet_a_failure_together(worker: object) -> None:
    assert run_ranks(worker, 2) == ["", ""]  # type: ignore[arg-type]  # both are workers


@pytest.mark.dist
def test_two_ranks_search_strategies_within_memory(tmp_path: Path) -> None:
    plan = plan_of(2)
    needed = peak_bytes(
        workload=replace(plan.workload, tokens_per_rank=42), degree=2,
        strategy="none", is_grouped=False)  # fmt: skip
    inputs = replace(plan.inputs, memory_limit_bytes=needed.device_bytes - 1)
    short = replace(plan, id=inputs.plan_id, inputs=inputs)
    assert run_ranks(online_workers.strategies, 2, short, tmp_path) == ["", ""]


@settings(max_examples=12, deadline=None)
@given(by_degree=st.lists(st.floats(0.1, 10.0), min_size=100, max_size=100))
def test_a_search_ends_whatever_it_measures(by_degree: list[float]) -> None:
    now: list[Decision] = []
    with TemporaryDirectory() as folder:
        search = OnlineSearch(
            make_tuner=lambda: study_tuner(Path(folder)),
            clock=lambda _, __: MadeUp(by_degree[now[-1].degree]),
        )
        layer = search.layer(plan_of(1).workload.key, [plan_of(1)], None)
        for step in range(300):
            tokens = (40, 90)[step % 2]
            now.append(layer.decide(tokens))
            watch = layer.watch(tokens, torch.device("cpu"))
            watch.begin()
            y = torch.ones(1, requires_grad=True) * 2
            watch.end_forward(y)
            y.backward()
            search.step()
    assert search.trial is None
    for last in (now[-20::2], now[-19::2]):
        assert len(set(last)) == 1, "decisions still change"


def test_it_finds_the_best_degrees_says_so_and_keeps_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="moetune")
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6))
    num_steps = steps_until_settled(layer, book, tuner, [40])
    (settled,) = tuner.settled
    assert degrees(settled.decision) == (6, 6)
    assert (settled.tokens_per_rank, settled.num_steps) == (40, num_steps - 1)
    assert settled.planned_seconds == pytest.approx(2.4)
    assert settled.seconds == pytest.approx([2.0] * 4)
    (line,) = [record.message for record in caplog.records]
    assert line == (
        "40 tokens: search settled after 4 trials: 6 chunks, strategy none; "
        "400 ms (20.0 %) faster than the plan"
    )
    with open_store(f"{tmp_path}/moetune.db") as store:
        assert store.settled(plan_of(1).id) == (settled,)
        assert store.plan(plan_of(1).id) == plan_of(1)
    train(layer, 40)
    assert degrees(layer.decision) == (6, 6)


def test_a_tensor_layer_is_searched_for_degrees_alone(tmp_path: Path) -> None:
    clock, tuner = MadeUpClock(best_at(6, 6)), study_tuner(tmp_path)
    plan = small_plan(layer=SHAPE, world_size=1, dtype="float64", expert_parallel="tensor")
    book = PlanBook([plan], search=OnlineSearch(make_tuner=lambda: tuner, clock=clock))
    layer = TensorExpertLayer(8, 16, 4, 2, plan=book, dtype=torch.float64)
    clock.layer = layer
    steps_until_settled(layer, book, tuner, [40])
    train(layer, 40)
    assert degrees(layer.decision) == (6, 6)
    assert [task.space.strategies for task in tuner.tasks] == [("none",)]


def test_a_later_book_starts_from_what_was_settled(tmp_path: Path) -> None:
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6))
    steps_until_settled(layer, book, tuner, [40])
    later = study_tuner(tmp_path)
    search = OnlineSearch(settled=tuner.settled, make_tuner=lambda: later)
    book = PlanBook([plan_of(1)], search=search)
    layer = make(pipeline=True, plan=book, dtype=torch.float64)
    for _ in range(3):
        train(layer, 40)
        book.step()
        assert degrees(layer.decision) == (6, 6)
    assert later.tasks == []
    assert book.digest != PlanBook([plan_of(1)]).digest


def test_a_job_that_ended_in_a_search_leaves_it_to_the_next(tmp_path: Path) -> None:
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6))
    for _ in range(8):
        train(layer, 40)
        book.step()
    assert tuner.settled == []
    count = tuner.num_tells
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6))
    steps_until_settled(layer, book, tuner, [40])
    alone = study_tuner(tmp_path / "alone")
    assert count > 4
    assert degrees(tuner.settled[0].decision) == (6, 6)
    layer, book, _, alone = online_layer(tmp_path / "alone", best_at(6, 6))
    steps_until_settled(layer, book, alone, [40])
    assert tuner.num_tells == alone.num_tells - 4


def test_sizes_between_two_that_agree_and_near_sizes_are_not_searched(tmp_path: Path) -> None:
    layer, book, _, tuner = online_layer(tmp_path, best_at(4, 4))
    steps_until_settled(layer, book, tuner, [30, 90])
    for tokens in (31, 50, 70, 89, 92):
        train(layer, tokens)
        book.step()
        assert degrees(layer.decision) == (4, 4)
    assert [task.tokens_per_rank for task in tuner.tasks] == [30, 90]


def test_one_size_is_searched_at_a_time_and_others_are_looked_up(tmp_path: Path) -> None:
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6))
    for _ in range(6):
        train(layer, 40)
        book.step()
        train(layer, 90)
        assert degrees(layer.decision) == PLANNED
    assert len(tuner.tasks) == 1
    steps_until_settled(layer, book, tuner, [40, 90])
    assert [task.tokens_per_rank for task in tuner.tasks] == [40, 90]


def test_a_size_that_does_not_come_again_gives_way_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "PATIENCE_STEPS", 5)
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6))
    for _ in range(8):
        train(layer, 90)
        book.step()
    for _ in range(6):
        train(layer, 40)
        book.step()
    assert [task.tokens_per_rank for task in tuner.tasks] == [90, 40]
    steps_until_settled(layer, book, tuner, [40])
    count = tuner.num_tells
    steps_until_settled(layer, book, tuner, [90])
    assert tuner.num_tells - count < count - 4


def test_the_first_step_with_a_decision_is_not_counted(tmp_path: Path) -> None:
    layer, book, clock, tuner = online_layer(tmp_path, best_at(4, 4))
    with torch.no_grad():  # an evaluation is not measured, and starts no search
        layer(torch.randn(40, 8, dtype=torch.float64))
    book.step()
    assert (tuner.tasks, clock.num_stamps) == ([], 0)
    counts = []
    for _ in range(11):
        train(layer, 40)
        book.step()
        counts.append(tuner.num_tells)
    assert counts == [0, 0, 1, 2, 3, 4, 4, 5, 6, 6, 7]
    assert clock.num_stamps == 4 * 10


def test_a_layer_that_is_computed_again_in_the_backward_pass_is_measured(tmp_path: Path) -> None:
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6))
    x = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    for _ in range(40):
        y = checkpoint(layer, x, use_reentrant=False)
        y.sum().backward()
        book.step()
    (settled,) = tuner.settled
    assert degrees(settled.decision) == (6, 6)


def test_calls_of_one_step_are_averaged_and_scaled_to_the_size(tmp_path: Path) -> None:
    layer, book, _, tuner = online_layer(tmp_path, lambda _, degree: 1.0 + abs(degree - 3.5))
    for _ in range(2):
        train(layer, 40)
        book.step()
    for _ in range(30):
        for tokens in (40, 40, 42):
            train(layer, tokens)
        book.step()
    (settled,) = tuner.settled
    mean = 3.0 * (2 + 40 / 42) / 3
    assert settled.seconds == pytest.approx([mean] * 4)


def test_layers_of_one_shape_share_a_search_and_a_copied_layer_goes_on_with_it(
    tmp_path: Path,
) -> None:
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6))
    twin = make(pipeline=True, plan=book, dtype=torch.float64)
    for _ in range(40):
        train(layer, 40)
        train(twin, 40)
        assert twin.decision == layer.decision
        book.step()
    assert len(tuner.settled) == 1
    copied = copy.deepcopy(make(pipeline=True, plan=book, dtype=torch.float64))
    train(copied, 40)
    assert degrees(copied.decision) == (6, 6)


def test_a_forced_strategy_is_searched_for_itself(tmp_path: Path) -> None:
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6), memory_reuse="S4")
    steps_until_settled(layer, book, tuner, [40])
    (settled,) = tuner.settled
    assert (settled.memory_reuse, settled.decision.strategy) == ("S4", "S4")
    free = PlanBook([plan_of(1)], search=OnlineSearch(settled=[settled], make_tuner=lambda: tuner))
    layer = make(pipeline=True, plan=free, dtype=torch.float64)
    train(layer, 40)
    assert degrees(layer.decision) == PLANNED


def test_a_store_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "moetune.db").mkdir()
    layer, book, _, tuner = online_layer(tmp_path, best_at(6, 6))
    steps_until_settled(layer, book, tuner, [40])
    train(layer, 40)
    assert degrees(layer.decision) == (6, 6)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_hosts_clock_times_both_passes_of_a_call_once() -> None:
    noted: list[CallWatch] = []
    watch = CallWatch(device_clock, torch.device("cpu"), tokens_per_rank=1, note=noted.append)
    x = torch.ones(3, requires_grad=True)
    watch.begin()
    y = (x * 2).sum()
    watch.end_forward(y)
    assert noted == [watch]
    assert watch.seconds() is None
    y.backward(retain_graph=True)
    seconds = watch.seconds()
    assert seconds is not None
    assert min(seconds) > 0
    y.backward()
    assert watch.seconds() == seconds
